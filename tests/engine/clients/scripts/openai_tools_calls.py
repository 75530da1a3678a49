"""OpenAI's own client with tools and types, on two routes. Run in .venv-clients: ADDRESS KEY."""

import json
import sys
from typing import Any

import openai
from agent_tools import QUESTION, Sky, check, get_weather

address, key = sys.argv[1:]
client = openai.OpenAI(base_url=f"{address}/v1", api_key=key, max_retries=0)
PARAMETERS: Any = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
FUNCTION: Any = {"name": "get_weather", "description": get_weather.__doc__, "parameters": PARAMETERS}
TOOLS: Any = [{"type": "function", "function": FUNCTION}]
ASK: Any = [{"role": "user", "content": QUESTION}]
STILL: Any = {"model": "demo", "temperature": 0}


def results(tool_calls: Any) -> list[Any]:
    return [
        {"role": "tool", "tool_call_id": call.id, "content": get_weather(**json.loads(call.function.arguments))}
        for call in tool_calls
    ]


def chat() -> None:
    message = client.chat.completions.create(**STILL, messages=ASK, tools=TOOLS).choices[0].message
    history = [*ASK, message, *results(message.tool_calls)]
    check(client.chat.completions.create(**STILL, messages=history, tools=TOOLS).choices[0].message.content)


def chat_streamed() -> None:
    with client.chat.completions.stream(**STILL, messages=ASK, tools=TOOLS) as stream:
        message = stream.get_final_completion().choices[0].message
    history = [*ASK, message, *results(message.tool_calls)]
    with client.chat.completions.stream(**STILL, messages=history, tools=TOOLS) as stream:
        text = "".join(event.delta for event in stream if event.type == "content.delta")
        assert stream.get_final_completion().choices[0].message.content == text
    check(text)


def parsed() -> None:
    found = client.beta.chat.completions.parse(**STILL, messages=ASK, response_format=Sky).choices[0].message.parsed
    assert isinstance(found, Sky)


def parsed_tools() -> None:
    tool = openai.pydantic_function_tool(Sky)
    answer = client.beta.chat.completions.parse(**STILL, messages=ASK, tools=[tool], tool_choice="required")
    (call,) = answer.choices[0].message.tool_calls or []
    assert isinstance(call.function.parsed_arguments, Sky)


def outputs(items: Any) -> list[Any]:
    found = [item for item in items if item.type == "function_call"]
    return [
        {"type": "function_call_output", "call_id": call.call_id, "output": get_weather(**json.loads(call.arguments))}
        for call in found
    ]


def responses() -> None:
    tools: Any = [{"type": "function", "strict": True, **FUNCTION}]
    first = client.responses.create(**STILL, input=QUESTION, tools=tools)
    history: Any = [{"role": "user", "content": QUESTION}, *first.output, *outputs(first.output)]
    check(client.responses.create(**STILL, input=history, tools=tools).output_text)


def responses_streamed() -> None:
    tools: Any = [{"type": "function", "strict": True, **FUNCTION}]
    with client.responses.stream(**STILL, input=QUESTION, tools=tools) as stream:
        arguments = "".join(event.delta for event in stream if event.type == "response.function_call_arguments.delta")
        first = stream.get_final_response()
    assert json.loads(arguments) == {"city": "Paris"}
    history: Any = [{"role": "user", "content": QUESTION}, *first.output, *outputs(first.output)]
    with client.responses.stream(**STILL, input=history, tools=tools, store=False) as stream:
        check("".join(event.delta for event in stream if event.type == "response.output_text.delta"))


def responses_parsed() -> None:
    assert isinstance(client.responses.parse(**STILL, input=QUESTION, text_format=Sky).output_parsed, Sky)


for run in (chat, chat_streamed, parsed, parsed_tools, responses, responses_streamed, responses_parsed):
    run()
    print(run.__name__, flush=True)
