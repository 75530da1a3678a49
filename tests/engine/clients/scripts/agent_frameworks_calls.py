"""langchain-openai, litellm and anthropic with tools and types. Run in .venv-clients: ADDRESS KEY."""

import json
import os
import sys
from typing import Any

# Otherwise it downloads a list of prices.
os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"
import anthropic
import litellm
from agent_tools import QUESTION, Sky, check, get_weather
from langchain_core.messages import AIMessage, HumanMessage, ToolMessage
from langchain_openai import ChatOpenAI

litellm.telemetry = False
litellm.suppress_debug_info = True

address, key = sys.argv[1:]
PARAMETERS: Any = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
FUNCTION: Any = {"name": "get_weather", "description": get_weather.__doc__, "parameters": PARAMETERS}
TOOLS: Any = [{"type": "function", "function": FUNCTION}]
ASK: Any = [{"role": "user", "content": QUESTION}]


def langchain(**fields: Any) -> Any:
    return ChatOpenAI(model="demo", base_url=f"{address}/v1", api_key=key, max_retries=0, temperature=0, **fields)


def langchain_tools(streamed: bool, **fields: Any) -> None:
    chat = langchain(**fields).bind_tools(TOOLS)
    history: list[Any] = [HumanMessage(QUESTION)]
    for _ in range(2):
        if streamed:
            first, *others = chat.stream(history)
            answer: Any = first
            for other in others:
                answer += other
        else:
            answer = chat.invoke(history)
        history.append(AIMessage(content=answer.content, tool_calls=answer.tool_calls, id=answer.id))
        history += [ToolMessage(get_weather(**call["args"]), tool_call_id=call["id"]) for call in answer.tool_calls]
    assert isinstance(history[-1], AIMessage)
    check(history[-1].text)


def langchain_typed(method: str) -> None:
    assert isinstance(langchain().with_structured_output(Sky, method=method).invoke(QUESTION), Sky)


def litellm_tools(model: str, streamed: bool) -> None:
    options: Any = {"model": model, "api_base": f"{address}/v1", "api_key": key, "num_retries": 0, "temperature": 0}
    history = list(ASK)
    for _ in range(2):
        answer = litellm.completion(**options, messages=history, tools=TOOLS, stream=streamed)
        if streamed:
            answer = litellm.stream_chunk_builder(list(answer), messages=history)
        message = answer.choices[0].message
        history.append(message.model_dump(exclude_none=True))
        for call in message.tool_calls or []:
            result = get_weather(**json.loads(call.function.arguments))
            history.append({"role": "tool", "tool_call_id": call.id, "content": result})
    check(history[-1]["content"])


def litellm_typed() -> None:
    answer = litellm.completion(
        model="hosted_vllm/demo",
        api_base=f"{address}/v1",
        api_key=key,
        messages=ASK,
        response_format=Sky,
        temperature=0,
    )
    Sky.model_validate_json(answer.choices[0].message.content)


def litellm_responses() -> None:
    answer = litellm.responses(
        model="openai/demo", api_base=f"{address}/v1", api_key=key, input=QUESTION, temperature=0
    )
    assert answer.status == "completed"


def anthropic_tools(streamed: bool) -> None:
    client = anthropic.Anthropic(base_url=address, api_key=key, max_retries=0)
    tool: Any = {"name": "get_weather", "description": get_weather.__doc__, "input_schema": PARAMETERS}
    options: Any = {"model": "demo", "max_tokens": 200, "tools": [tool]}
    history: list[Any] = list(ASK)
    answer: Any = None
    for _ in range(2):
        if streamed:
            with client.messages.stream(**options, messages=history) as stream:
                answer = stream.get_final_message()
        else:
            answer = client.messages.create(**options, messages=history)
        history.append({"role": "assistant", "content": answer.content})
        used = [block for block in answer.content if block.type == "tool_use"]
        results = [
            {"type": "tool_result", "tool_use_id": block.id, "content": get_weather(**block.input)} for block in used
        ]
        if results:
            history.append({"role": "user", "content": results})
    check(answer.content[0].text)


CALLS: tuple[tuple[Any, ...], ...] = (
    (langchain_tools, False),
    (langchain_tools, True),
    (langchain_typed, "json_schema"),
    (langchain_typed, "function_calling"),
    (litellm_tools, "openai/demo", False),
    (litellm_tools, "openai/demo", True),
    (litellm_tools, "hosted_vllm/demo", False),
    (litellm_tools, "hosted_vllm/demo", True),
    (litellm_typed,),
    (litellm_responses,),
    (anthropic_tools, False),
    (anthropic_tools, True),
)
for run, *arguments in CALLS:
    run(*arguments)
    print("-".join([run.__name__, *map(str, arguments)]), flush=True)
langchain_tools(True, use_responses_api=True)
print("langchain_tools-responses", flush=True)
