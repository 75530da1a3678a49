"""A tool that langchain-openai calls, with only the address changed. Run in .venv-clients: ADDRESS.

The server calls get_weather, and says "It rains in Paris." once it has the result.
"""

import sys
from typing import Any

from langchain_core.messages import AIMessage, AIMessageChunk, HumanMessage, ToolMessage
from langchain_openai import ChatOpenAI

(address,) = sys.argv[1:]
QUESTION = "How is the weather in Paris?"
PARAMETERS = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
TOOL: dict[str, Any] = {"type": "function", "function": {"name": "get_weather", "parameters": PARAMETERS}}
chat = ChatOpenAI(model="demo", base_url=f"{address}/v1", api_key="any-key-1", max_retries=0).bind_tools([TOOL])


def finish(answer: AIMessage) -> None:
    (call,) = answer.tool_calls
    assert (call["name"], call["args"], answer.content) == ("get_weather", {"city": "Paris"}, "Let me look.")
    messages = [HumanMessage(QUESTION), answer, ToolMessage("rain", tool_call_id=call["id"])]
    assert chat.invoke(messages).content == "It rains in Paris."


def langchain_in_one_piece() -> None:
    answer = chat.invoke(QUESTION)
    assert isinstance(answer, AIMessage) and answer.response_metadata["finish_reason"] == "tool_calls"
    finish(answer)


def langchain_streamed() -> None:
    first, *others = chat.stream(QUESTION)
    whole: Any = first
    for chunk in others:
        whole += chunk
    assert isinstance(whole, AIMessageChunk)
    finish(AIMessage(content=whole.content, tool_calls=whole.tool_calls))


for run in (langchain_in_one_piece, langchain_streamed):
    run()
    print(run.__name__, flush=True)
