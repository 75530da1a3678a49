"""Anthropic's Messages API: what reaches the model, the blocks and events of answers, and what is refused."""

import asyncio
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from quire_engine.api.answer_blocks import partial_object
from quire_engine.config import AccessOptions
from quire_engine.errors import Unavailable

Serving = Callable[..., Any]

PYTHON = Path(__file__).parents[4] / ".venv-clients" / "bin" / "python"
SCRIPT = Path(__file__).parents[2] / "clients" / "scripts" / "anthropic_calls.py"

TEMPLATE = (
    "{% for t in tools or [] %}{{ t | tojson }}<tool_call>\n{\"name\": n, 'arguments': a}</tool_call>{% endfor %}"
    "{% for m in messages %}<{{ m.role }}>{{ m.reasoning_content or '' }}{{ m.content }}"
    "{% for c in m.tool_calls or [] %}{{ c.function.name }}({{ c.function.arguments.city }}){% endfor %}{% endfor %}"
    "{% if add_generation_prompt %}<answer>{% if enable_thinking %}<think>\n{% else %}<think>\n\n</think>{% endif %}"
    "{% endif %}"
)
WEATHER = {"name": "get_weather", "description": "x", "input_schema": {"properties": {"city": {"type": "string"}}}}
CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris"}}\n</tool_call>'
ASK: Any = [{"role": "user", "content": "Weather?"}]


async def post(server: Any, path: str = "", **fields: Any) -> Any:
    body = {"model": "demo", "max_tokens": 200, "messages": ASK, **fields}
    return await server.http.post(f"/v1/messages{path}", json=body)


def events(text: str) -> list[dict[str, Any]]:
    found = []
    for event in text.removesuffix("\n\n").split("\n\n"):
        name, data = event.split("\n")
        found.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {found[-1]['type']}"
    return found


def collected(parts: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the message of a stream, put together as Anthropic's client does."""
    message: dict[str, Any] = parts[0]["message"]
    texts: dict[int, str] = {}
    for part in parts[1:-2]:
        index = part["index"]
        if part["type"] == "content_block_start":
            assert index == len(message["content"])
            message["content"].append(part["content_block"])
            texts[index] = ""
        elif part["type"] == "content_block_delta":
            texts[index] += next(value for name, value in part["delta"].items() if name != "type")
    for index, block in enumerate(message["content"]):
        if block["type"] == "tool_use":
            block["input"] = json.loads(texts[index] or "{}")
        else:
            block[block["type"]] = texts[index]
    delta = parts[-2]
    assert (delta["type"], parts[-1]) == ("message_delta", {"type": "message_stop"})
    return {**message, **delta["delta"], "usage": delta["usage"]}


@pytest.mark.parametrize(
    ("says", "fields", "kinds", "stop"),
    [
        ("Hello", {}, ["text"], ("end_turn", None)),
        ("", {}, ["text"], ("end_turn", None)),
        ("Hello you", {"stop_sequences": ["lo y"]}, ["text"], ("stop_sequence", "lo y")),
        ("Hello", {"max_tokens": 2}, ["text"], ("max_tokens", None)),
        ("Hm.</think>Hello", {"thinking": {"type": "enabled", "budget_tokens": 1024}}, ["thinking", "text"],
         ("end_turn", None)),
        ("Hm.</think>" + CALL, {"tools": [WEATHER], "thinking": {"type": "enabled"}}, ["thinking", "tool_use"],
         ("tool_use", None)),
        ("Look: " + CALL + CALL, {"tools": [WEATHER]}, ["text", "tool_use", "tool_use"], ("tool_use", None)),
        (CALL + CALL, {"tools": [WEATHER], "tool_choice": {"type": "auto", "disable_parallel_tool_use": True}},
         ["tool_use"], ("tool_use", None)),
    ],
)  # fmt: skip
async def test_a_streamed_message_is_the_whole_one(
    serving: Serving, says: str, fields: dict[str, Any], kinds: list[str], stop: tuple[str, str | None]
) -> None:
    async with serving(says, template=TEMPLATE) as server:
        whole = (await post(server, **fields)).json()
        streamed = await post(server, stream=True, **fields)
        assert streamed.headers["content-type"].startswith("text/event-stream")
        joined = collected(events(streamed.text))
        assert [block["type"] for block in whole["content"]] == kinds
        assert (whole["stop_reason"], whole["stop_sequence"]) == stop
        for message in (whole, joined):
            assert message.pop("id").startswith("msg_")
            for block in message["content"]:
                block.pop("id", None)
        assert joined == whole
        assert whole["model"] == "demo" and whole["role"] == "assistant"


async def test_a_call_and_its_result_reach_the_model(serving: Serving) -> None:
    async with serving("Look: " + CALL, template=TEMPLATE) as server:
        answer = (await post(server, tools=[WEATHER], system=[{"type": "text", "text": "Be brief."}])).json()
        text, call = answer["content"]
        assert text["text"] == "Look:" and (call["name"], call["input"]) == ("get_weather", {"city": "Paris"})
        server.engine.says = "Rain."
        history = [
            *ASK,
            {"role": "assistant", "content": answer["content"]},
            {
                "role": "user",
                "content": [
                    {"type": "tool_result", "tool_use_id": call["id"], "content": [{"type": "text", "text": "rain"}]},
                    {"type": "text", "text": "So?", "cache_control": {"type": "ephemeral"}},
                ],
            },
        ]
        last = (await post(server, tools=[WEATHER], messages=history)).json()
        assert last["content"] == [{"type": "text", "text": "Rain."}]
        first, second = (server.context.tokenizer.decode(stream.prompt) for stream in server.engine.streams)
        assert "<system>Be brief.<user>Weather?<answer>" in first and '"parameters": {"properties"' in first
        expected = "<user>Weather?<assistant>Look:get_weather(Paris)<tool>rain<user>So?<answer><think>\n\n</think>"
        assert second.endswith(expected)


async def test_a_last_message_of_the_assistant_is_continued(serving: Serving) -> None:
    async with serving(" you") as server:
        history = [*ASK, {"role": "assistant", "content": "I greet"}]
        assert (await post(server, messages=history)).json()["content"][0]["text"] == " you"
        assert server.context.tokenizer.decode(server.engine.streams[0].prompt).endswith("<assistant>I greet")


async def test_tokens_are_counted_as_the_request_counts_them(serving: Serving) -> None:
    async with serving("Hello", template=TEMPLATE) as server:
        fields: dict[str, Any] = {"tools": [WEATHER], "system": "Be brief."}
        body = {"model": "demo", "messages": ASK, **fields}
        counted = (await server.http.post("/v1/messages/count_tokens", json=body)).json()
        usage = (await post(server, **fields)).json()["usage"]
        assert counted == {"input_tokens": usage["input_tokens"] + usage["cache_read_input_tokens"]}
        assert usage["cache_read_input_tokens"] == 3 and usage["output_tokens"] == 6


async def test_a_schema_constrains_the_answer(serving: Serving) -> None:
    async with serving('{"a":1}') as server:
        schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
        config = {"format": {"type": "json_schema", "schema": schema}, "effort": "low"}
        assert (await post(server, output_config=config)).status_code == 200
        assert "properties" in server.context.grammars.specs[0].text


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"max_tokens": None}, "max_tokens"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]}, "'image' is not supported"),
        ({"messages": [{"role": "user", "content": [{"type": "tool_use", "id": "1", "name": "n", "input": {}}]}]},
         "no block 'tool_use'"),
        ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "'web_search_20250305' is not supported"),
        ({"tools": [WEATHER], "tool_choice": {"type": "tool", "name": "x"}}, "tool_choice: 'x' is not one of"),
        ({"tool_choice": {"type": "any"}}, "tool_choice: needs tools"),
        ({"mcp_servers": [{"url": "x"}]}, "mcp_servers"),
        ({"max_token": 3}, "did you mean max_tokens"),
        ({"thinking": {"type": "on"}}, "thinking.type"),
    ],
)  # fmt: skip
async def test_bad_requests_are_refused_by_name(serving: Serving, fields: dict[str, Any], named: str) -> None:
    async with serving("Hello", template=TEMPLATE) as server:
        answer = await post(server, **fields)
        body = answer.json()
        assert answer.status_code == 400 and body["type"] == "error"
        assert body["error"]["type"] == "invalid_request_error" and named in body["error"]["message"]


async def test_errors_have_the_anthropic_format(serving: Serving, tmp_path: Path) -> None:
    (tmp_path / "keys").write_text("api-key-number-1\n")
    async with serving("Hello", access=AccessOptions(api_key_file=tmp_path / "keys")) as server:
        denied = await post(server)
        assert (denied.status_code, denied.json()["error"]["type"]) == (401, "authentication_error")
        server.http.headers["x-api-key"] = "api-key-number-1"
        assert (await post(server)).status_code == 200
        lost = await post(server, model="other")
        assert (lost.status_code, lost.json()["error"]["type"]) == (404, "not_found_error")
        assert lost.json()["error"]["code"] == "model_not_found"


async def test_a_stream_that_fails_ends_with_an_error_event(serving: Serving) -> None:
    async with serving() as server:
        body = {"model": "demo", "max_tokens": 5, "messages": ASK, "stream": True}
        request = server.http.build_request("POST", "/v1/messages", json=body)
        asking = asyncio.create_task(server.http.send(request, stream=True))
        stream = await server.engine.stream()
        stream.draw([65])
        response = await asking
        stream.breaks(Unavailable("the engine stopped", code="engine_stopped"))
        text = ""
        with pytest.raises(httpx.RemoteProtocolError, match="incomplete"):
            async for part in response.aiter_text():
                text += part
        last = events(text)[-1]
        assert last["type"] == "error" and last["error"]["type"] == "overloaded_error"
        assert last["error"]["code"] == "engine_stopped"


async def test_anthropic_client_works_unchanged(serving: Serving) -> None:
    """Anthropic's client asks, streams, calls a tool, sends its result, counts tokens and raises its own errors."""

    def says(prompt: str) -> str:
        return "It rains in Paris." if "<tool>" in prompt else "Let me look. " + CALL

    async with serving(says, template=TEMPLATE) as server:
        assert PYTHON.is_file(), "there is no .venv-clients: run make setup-dev"
        client = await asyncio.create_subprocess_exec(
            *(str(PYTHON), str(SCRIPT), server.address), stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE
        )
        written, errors = await client.communicate()
        assert client.returncode == 0, f"after {written.decode().split()}:\n{errors.decode()[-3000:]}"
        assert len(written.decode().split()) == 5


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ("", {}),
        ('{"a": [1, 2]}', {"a": [1, 2]}),
        ('{"a": 1, "b": [1, 2', {"a": 1, "b": [1, 2]}),
        ('{"a": 1, "b": "x', {"a": 1}),
        ("no JSON", {}),
        ("[1]", {}),
    ],
)
def test_arguments_that_were_cut_keep_their_values(arguments: str, expected: dict[str, Any]) -> None:
    assert partial_object(arguments) == expected
