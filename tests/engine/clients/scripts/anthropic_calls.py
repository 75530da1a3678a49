"""Anthropic's own client, with only the address changed. Run in .venv-clients: ADDRESS.

The server calls get_weather, and says "It rains in Paris." once it has the result.
"""

import sys
from typing import Any

import anthropic

(address,) = sys.argv[1:]
client = anthropic.Anthropic(base_url=address, api_key="any-key-1", max_retries=0)
ASK: Any = [{"role": "user", "content": "How is the weather in Paris?"}]
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
TOOLS: Any = [{"name": "get_weather", "description": "The weather of a city.", "input_schema": SCHEMA}]
OPTIONS: Any = {"model": "demo", "max_tokens": 200, "system": "Be brief.", "tools": TOOLS}


def finish(answer: Any) -> None:
    text, call = answer.content
    assert (answer.stop_reason, text.text) == ("tool_use", "Let me look.")
    assert (call.name, call.input) == ("get_weather", {"city": "Paris"})
    result = {"type": "tool_result", "tool_use_id": call.id, "content": "rain"}
    history = [*ASK, {"role": "assistant", "content": answer.content}, {"role": "user", "content": [result]}]
    last = client.messages.create(**OPTIONS, messages=history)
    assert last.content[0].text == "It rains in Paris." and last.stop_reason == "end_turn"


def in_one_piece() -> None:
    finish(client.messages.create(**OPTIONS, messages=ASK))


def streamed() -> None:
    with client.messages.stream(**OPTIONS, messages=ASK) as stream:
        text = "".join(stream.text_stream)
        answer = stream.get_final_message()
    assert text == "Let me look." and answer.usage.output_tokens > 5
    finish(answer)


def as_events() -> None:
    kinds = [event.type for event in client.messages.create(**OPTIONS, messages=ASK, stream=True)]
    assert kinds[0] == "message_start" and kinds[-2:] == ["message_delta", "message_stop"]
    assert kinds.count("content_block_start") == kinds.count("content_block_stop") == 2


def counted() -> None:
    used = client.messages.create(**OPTIONS, messages=ASK).usage
    found = client.messages.count_tokens(model="demo", messages=ASK, tools=TOOLS, system="Be brief.")
    assert found.input_tokens == used.input_tokens + (used.cache_read_input_tokens or 0)


def errors() -> None:
    try:
        client.messages.create(**OPTIONS | {"model": "other"}, messages=ASK)
    except anthropic.NotFoundError as error:
        assert isinstance(error.body, dict) and error.body["error"]["type"] == "not_found_error"
    else:
        raise AssertionError("another model was served")


for run in (in_one_piece, streamed, as_events, counted, errors):
    run()
    print(run.__name__, flush=True)
