import asyncio
import json
from collections.abc import Callable
from typing import Any

import pytest

from quire_engine.text.model_text import SamplingDefaults

Serving = Callable[..., Any]


def events(text: str) -> list[Any]:
    """Return the events of a stream, including [DONE]."""
    assert text.endswith("\n\n")
    blocks = [block.split("\n")[-1].removeprefix("data: ") for block in text[:-2].split("\n\n")]
    return [block if block == "[DONE]" else json.loads(block) for block in blocks]


async def test_completion_without_streaming(serving: Serving) -> None:
    async with serving("Hello") as server:
        response = await server.complete(max_tokens=10)
        assert response.status_code == 200
        body = response.json()
        assert body["id"].startswith("cmpl-") and body["object"] == "text_completion" and body["model"] == "demo"
        assert body["choices"] == [
            {"index": 0, "text": "Hello", "logprobs": None, "finish_reason": "stop", "stop_reason": None}
        ]
        assert body["usage"] == {
            "prompt_tokens": 2,
            "completion_tokens": 6,
            "total_tokens": 8,
            "prompt_tokens_details": {"cached_tokens": 3},
        }


async def test_max_tokens_defaults_to_sixteen(serving: Serving) -> None:
    async with serving("x" * 100) as server:
        choice = (await server.complete()).json()["choices"][0]
        assert (choice["text"], choice["finish_reason"]) == ("x" * 16, "length")


async def test_a_streamed_completion_byte_for_byte(serving: Serving) -> None:
    async with serving("é!") as server:
        response = await server.complete(stream=True, max_tokens=10)
        assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
        assert "content-length" not in response.headers
        made = events(response.text)
        assert made[-1] == "[DONE]" and response.text.endswith("data: [DONE]\n\n")
        assert "".join(chunk["choices"][0]["text"] for chunk in made[:-1]) == "é!"
        assert [chunk["choices"][0]["finish_reason"] for chunk in made[:-1]][-1] == "stop"
        assert all(reason is None for reason in [chunk["choices"][0]["finish_reason"] for chunk in made[:-2]])
        assert "usage" not in made[0]
        assert len({chunk["id"] for chunk in made[:-1]}) == 1


@pytest.mark.parametrize(
    ("options", "with_usage"),
    [({"include_usage": True}, [False, True]), ({"include_usage": True, "continuous_usage_stats": True}, [True, True])],
)
async def test_usage_in_a_stream(serving: Serving, options: dict[str, bool], with_usage: list[bool]) -> None:
    async with serving("ab") as server:
        made = events((await server.complete(stream=True, stream_options=options, max_tokens=2)).text)
        assert [bool(made[0]["usage"]), bool(made[-2]["usage"])] == with_usage
        assert made[-2]["choices"] == [] and made[-2]["usage"]["completion_tokens"] == 2


async def test_several_prompts_and_choices_keep_their_order(serving: Serving) -> None:
    async with serving("ok") as server:
        body = (await server.complete(prompt=["a", "bb"], n=2, max_tokens=5, seed=7)).json()
        assert [choice["index"] for choice in body["choices"]] == [0, 1, 2, 3]
        assert [len(stream.prompt) for stream in server.engine.streams] == [1, 1, 2, 2]
        first, second, *others = [stream.params.seed for stream in server.engine.streams]
        assert first == 7 and second not in (7, 8, None) and others == [first, second]
        assert body["usage"]["prompt_tokens"] == 3 and body["usage"]["completion_tokens"] == 12


async def test_several_answers_are_streamed_side_by_side(serving: Serving) -> None:
    async with serving("ok") as server:
        made = events((await server.complete(n=3, stream=True, max_tokens=5)).text)[:-1]
        texts = {index: "" for index in range(3)}
        for chunk in made:
            texts[chunk["choices"][0]["index"]] += chunk["choices"][0]["text"]
        assert texts == {0: "ok", 1: "ok", 2: "ok"}
        assert sum(chunk["choices"][0]["finish_reason"] is not None for chunk in made) == 3


async def test_prompts_of_token_ids(serving: Serving, token_ids: Callable[[str], list[int]]) -> None:
    async with serving("ok") as server:
        response = await server.complete(prompt=[token_ids("abc"), token_ids("d")], echo=True)
        assert [choice["text"] for choice in response.json()["choices"]] == ["abcok", "dok"]
        assert [stream.prompt for stream in server.engine.streams] == [token_ids("abc"), token_ids("d")]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("fields", "text", "tokens"),
    [
        ({"stop": "c"}, "ab", 3),
        ({"stop": ["de", "zz"]}, "abc", 5),
        ({"stop": ["de"], "include_stop_str_in_output": True}, "abcde", 5),
        ({"stop": "a", "min_tokens": 1}, "abcdef", 7),
    ],
)
async def test_stop_strings_end_the_answer_and_free_the_engine(
    serving: Serving, fields: dict[str, Any], text: str, tokens: int, stream: bool
) -> None:
    async with serving("abcdef") as server:
        response = await server.complete(stream=stream, max_tokens=20, **fields)
        if stream:
            chunks = [chunk["choices"][0] for chunk in events(response.text)[:-1]]
            assert "".join(chunk["text"] for chunk in chunks) == text
            last = chunks[-1]
        else:
            last = response.json()["choices"][0]
            assert last["text"] == text
            assert response.json()["usage"]["completion_tokens"] == tokens
        assert last["finish_reason"] == "stop"
        if tokens <= 6:
            assert last["stop_reason"] in ([fields["stop"]] if isinstance(fields["stop"], str) else fields["stop"])
            assert server.engine.streams[0].cancelled.is_set()


async def test_stop_token_id_is_reported_and_its_text_omitted(
    serving: Serving, token_ids: Callable[[str], list[int]]
) -> None:
    async with serving() as server:
        asking = asyncio.create_task(server.complete(stop_token_ids=token_ids("z"), max_tokens=9))
        stream = await server.engine.stream()
        assert stream.params.stop_token_ids == tuple(token_ids("z"))
        stream.draw(token_ids("ab"))
        stream.draw(token_ids("z"), "stop", stop_id=token_ids("z")[0])
        choice = (await asking).json()["choices"][0]
        assert (choice["text"], choice["finish_reason"], choice["stop_reason"]) == ("ab", "stop", token_ids("z")[0])


async def test_logprobs_as_parallel_arrays(serving: Serving) -> None:
    async with serving("hi é") as server:
        body = (await server.complete(logprobs=2, max_tokens=5)).json()
        found = body["choices"][0]["logprobs"]
        assert found["tokens"] == ["h", "i", " ", "bytes:\\xc3", "bytes:\\xa9"]
        assert found["text_offset"] == [0, 1, 2, 3, 3]
        assert found["token_logprobs"] == [-0.25] * 5
        assert found["top_logprobs"][0] == {"h": -0.25, "!": -1.0, '"': -2.0}


async def test_streamed_logprobs_arrive_with_their_text(serving: Serving) -> None:
    async with serving("abé") as server:
        made = events((await server.complete(logprobs=0, max_tokens=9, stream=True, stop="zz")).text)[:-1]
        chunks = [chunk["choices"][0] for chunk in made]
        assert [chunk["text"] for chunk in chunks] == ["a", "b", "é", ""]
        assert [chunk["logprobs"]["text_offset"] for chunk in chunks[:3]] == [[0], [1], [2, 2]]
        assert chunks[2]["logprobs"]["tokens"] == ["bytes:\\xc3", "bytes:\\xa9"]


async def test_token_ids_are_returned_on_request(serving: Serving, token_ids: Callable[[str], list[int]]) -> None:
    async with serving("ok") as server:
        choice = (await server.complete(return_token_ids=True, max_tokens=2)).json()["choices"][0]
        assert choice["prompt_token_ids"] == token_ids("Hi") and choice["token_ids"] == token_ids("ok")


@pytest.mark.parametrize(
    ("fields", "status", "code", "part"),
    [
        ({"prompt": "x" * 512}, 400, "context_length_exceeded", "512 tokens"),
        ({"prompt": "x" * 140_000}, 400, "context_length_exceeded", "a prompt of 140000 characters"),
        ({"prompt": ""}, 400, None, "prompt: is empty"),
        ({"prompt": [999]}, 400, None, "prompt: 999 "),
        ({"logit_bias": {"999": 1}}, 400, None, "logit_bias: 999 "),
        ({"stop_token_ids": [999]}, 400, None, "stop_token_ids: 999 "),
        ({"logprobs": 21}, 400, None, "logprobs: 21 exceeds the limit of 20"),
        ({"priority": 1}, 400, None, "--scheduling-policy priority"),
        ({"model": "gpt-9"}, 404, "model_not_found", "demo, alias"),
        ({"n": 128, "prompt": ["a"] * 9}, 400, None, "1152 sequences"),
    ],
)
async def test_requests_beyond_model_limits_are_refused_with_numbers(
    serving: Serving, fields: dict[str, Any], status: int, code: str | None, part: str
) -> None:
    async with serving("ok") as server:
        response = await server.complete(**fields)
        error = response.json()["error"]
        assert (response.status_code, error["code"]) == (status, code)
        assert part in error["message"]
        assert server.engine.streams == []


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"prompt": "x" * 512}, "prompt"),
        ({"prompt": "x" * 512, "max_tokens": 1}, "prompt"),
        ({"prompt": ["x", "x" * 512], "max_tokens": 13}, "prompt"),
    ],
)
async def test_the_field_that_is_too_long_is_named(serving: Serving, fields: dict[str, Any], param: str) -> None:
    async with serving("ok") as server:
        assert (await server.complete(**fields)).json()["error"]["param"] == param


async def test_sampling_reaches_the_engine(serving: Serving) -> None:
    fields = {
        "temperature": 0.5,
        "top_p": 0.9,
        "top_k": 5,
        "min_p": 0.1,
        "presence_penalty": 1,
        "frequency_penalty": -1,
        "repetition_penalty": 1.2,
        "logit_bias": {"5": 2},
        "ignore_eos": True,
        "min_tokens": 2,
        "max_tokens": 4,
        "seed": -1,
    }
    async with serving("okay") as server:
        await server.complete(**fields, cache_salt="s", user="ann")
        stream = server.engine.streams[0]
        sent = {name: getattr(stream.params, name) for name in fields}
        assert sent == {**fields, "logit_bias": ((5, 2.0),), "seed": 2**63 - 1}
        assert stream.routing["cache_salt"] == "s"


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, (0.6, 40, 0.9)),
        ({"temperature": 0, "top_k": -1}, (0.0, None, 0.9)),
        ({"temperature": 1e-6, "top_k": 0, "top_p": 1}, (0.0, None, 1.0)),
    ],
)
async def test_model_sampling_defaults_apply_without_client_values(
    serving: Serving, fields: dict[str, Any], expected: tuple[Any, ...]
) -> None:
    async with serving(
        "ok", defaults=SamplingDefaults(params={"temperature": 0.6, "top_k": 40, "top_p": 0.9})
    ) as server:
        await server.complete(**fields)
        params = server.engine.streams[0].params
        assert (params.temperature, params.top_k, params.top_p) == expected


async def test_priority_is_passed_on_if_the_policy_uses_it(serving: Serving) -> None:
    async with serving("ok", priorities=True) as server:
        await server.complete(priority=-3)
        assert server.engine.streams[0].routing["priority"] == -3
