import asyncio
import json
from collections.abc import Callable
from typing import Any

import pytest

from quire_engine.core.sampling_params import SamplingParams
from quire_engine.text.model_text import SamplingDefaults

Serving = Callable[..., Any]
TokenIds = Callable[[str], list[int]]


async def test_chat_without_streaming(serving: Serving) -> None:
    async with serving("Hello") as server:
        body = (await server.chat()).json()
        assert body["id"].startswith("chatcmpl-") and body["object"] == "chat.completion"
        assert body["choices"] == [
            {
                "index": 0,
                "message": {"role": "assistant", "content": "Hello", "refusal": None},
                "logprobs": None,
                "finish_reason": "stop",
                "stop_reason": None,
            }
        ]
        assert body["usage"]["completion_tokens"] == 6


async def test_a_streamed_chat_byte_for_byte(serving: Serving) -> None:
    async with serving("é") as server:
        response = await server.chat(stream=True, stream_options={"include_usage": True})
        blocks = response.text.split("\n\n")
        assert blocks[-2:] == ["data: [DONE]", ""]
        chunks = [json.loads(block.removeprefix("data: ")) for block in blocks[:-2]]
        head = {name: chunks[0][name] for name in ("id", "created", "model")}
        assert all({name: chunk[name] for name in head} == head for chunk in chunks)
        assert [(chunk["choices"], bool(chunk["usage"])) for chunk in chunks] == [
            ([_choice({"role": "assistant", "content": ""})], False),
            ([_choice({"content": "é"})], False),
            ([_choice({}, "stop")], False),
            ([], True),
        ]


def _choice(delta: dict[str, str], finish_reason: str | None = None) -> dict[str, Any]:
    return {"index": 0, "logprobs": None, "finish_reason": finish_reason, "delta": delta}


async def test_prompt_equals_the_rendered_chat_template(serving: Serving, token_ids: TokenIds) -> None:
    async with serving("ok") as server:
        messages = [
            {"role": "developer", "content": "Be kind."},
            {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
        ]
        await server.chat(messages=messages)
        await server.chat(messages=messages, add_generation_prompt=False, continue_final_message=True)
        prompts = [server.context.tokenizer.decode(stream.prompt) for stream in server.engine.streams]
        assert prompts == ["<system>Be kind.\n<user>a\nb\n<assistant>", "<system>Be kind.\n<user>a\nb"]


async def test_roles_supported_by_a_template_reach_it(serving: Serving) -> None:
    calls = "{% for c in m.tool_calls or [] %}{{ c.function.arguments.a }}{% endfor %}"
    template = "{% for m in messages %}{{ m.role }}{{ m.content }}" + calls + ";{% endfor %}developer"
    async with serving("ok", template=template) as server:
        call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"a": 5}'}}
        await server.chat(
            messages=[
                {"role": "developer", "content": "x"},
                {"role": "assistant", "tool_calls": [call]},
                {"role": "tool", "tool_call_id": "1", "content": "y"},
            ]
        )
        assert (
            server.context.tokenizer.decode(server.engine.streams[0].prompt) == "developerx;assistant5;tooly;developer"
        )


async def test_template_variables_are_read_from_the_request(serving: Serving) -> None:
    async with serving("ok", template="{{ mood }} {{ messages[0].content }}") as server:
        await server.chat(chat_template_kwargs={"mood": "calm"})
        assert server.context.tokenizer.decode(server.engine.streams[0].prompt) == "calm Hi"


async def test_max_tokens_defaults_to_the_remaining_context(serving: Serving) -> None:
    async with serving("ok") as server:
        await server.chat()
        await server.chat(max_completion_tokens=7)
        (prompt, limits) = (len(server.engine.streams[0].prompt), [s.params.max_tokens for s in server.engine.streams])
        assert limits == [512 - prompt, 7]


async def test_model_default_max_tokens_applies_without_a_client_value(serving: Serving) -> None:
    async with serving("ok", defaults=SamplingDefaults(max_new_tokens=20)) as server:
        await server.chat()
        await server.chat(max_tokens=30)
        assert [stream.params.max_tokens for stream in server.engine.streams] == [20, 30]


async def test_logprobs_name_tokens_and_their_bytes(serving: Serving) -> None:
    async with serving("aé") as server:
        choice = (await server.chat(logprobs=True, top_logprobs=1)).json()["choices"][0]
        assert choice["logprobs"]["content"][0] == {
            "token": "a",
            "logprob": -0.25,
            "bytes": [97],
            "top_logprobs": [{"token": "!", "logprob": -1.0, "bytes": [33]}],
        }
        assert [entry["bytes"] for entry in choice["logprobs"]["content"]][1:3] == [[0xC3], [0xA9]]
        plain = (await server.chat(logprobs=True)).json()["choices"][0]["logprobs"]["content"][0]
        assert plain["top_logprobs"] == []


@pytest.mark.parametrize(
    ("fields", "part", "param"),
    [
        ({"messages": [{"role": "user", "content": "x" * 600}]}, "512 tokens", "messages"),
        ({"messages": [{"role": "user", "content": "x" * 500}]}, "512 tokens", "messages"),
        ({"top_logprobs": 21, "logprobs": True}, "logprobs: 21 exceeds the limit of 20", "logprobs"),
        ({"tools": [{"type": "function", "function": {"name": "f"}}]}, "no place for tools", "tools"),
    ],
)
async def test_invalid_chat_fields_are_refused(serving: Serving, fields: dict[str, Any], part: str, param: str) -> None:
    async with serving("ok") as server:
        response = await server.chat(**fields)
        error = response.json()["error"]
        assert response.status_code == 400 and error["type"] == "invalid_request_error"
        assert part in error["message"] and error["param"] == param


async def test_a_template_that_refuses_is_a_400(serving: Serving) -> None:
    async with serving("ok", template="{{ raise_exception('roles must alternate') }}") as server:
        error = (await server.chat()).json()["error"]
        assert error["message"].endswith(": roles must alternate") and error["param"] == "messages"


async def test_chat_without_a_template_is_a_400_with_code(serving: Serving) -> None:
    async with serving("ok", template=None) as server:
        response = await server.chat()
        assert response.status_code == 400 and response.json()["error"]["code"] == "no_chat_template"


async def test_lenient_mode_accepts_unknown_fields(serving: Serving) -> None:
    async with serving("ok", lenient=True) as server:
        assert (await server.chat(colour="red")).status_code == 200
    async with serving("ok") as server:
        response = await server.chat(colour="red")
        assert response.status_code == 400
        assert response.json()["error"]["message"] == "colour: unknown field"


async def test_tokens_of_one_update_are_one_event(serving: Serving, token_ids: TokenIds) -> None:
    async with serving() as server:
        asking = asyncio.create_task(server.chat(stream=True))
        stream = await server.engine.stream()
        assert isinstance(stream.params, SamplingParams)
        stream.draw(token_ids("Hello"))
        stream.draw(token_ids(" you"), "length")
        contents = [line for line in (await asking).text.split("\n\n") if '"content":"' in line]
        assert len(contents) == 3  # the role, and two updates
