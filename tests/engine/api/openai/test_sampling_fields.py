"""Sampling and report fields of requests, through HTTP: they reach the engine, and clients get the expected results.

Streamed and complete answers are compared.
"""

import asyncio
import json
from collections.abc import Callable
from typing import Any

import pytest

Serving = Callable[..., Any]
TokenIds = Callable[[str], list[int]]


def chunks(text: str) -> list[Any]:
    blocks = [block.removeprefix("data: ") for block in text.strip().split("\n\n")]
    assert blocks.pop() == "[DONE]"
    return [json.loads(block) for block in blocks]


async def completion(server: Any, *, stream: bool, **fields: Any) -> list[dict[str, Any]]:
    """Return the choices; those of a stream are combined."""
    response = await server.complete(stream=stream, **fields)
    assert response.status_code == 200, response.text
    if not stream:
        whole: list[dict[str, Any]] = response.json()["choices"]
        return whole
    made: dict[int, dict[str, Any]] = {}
    for chunk in chunks(response.text):
        for part in chunk["choices"]:
            choice = made.setdefault(part["index"], {"text": "", "logprobs": None})
            choice["text"] += part["text"]
            choice["finish_reason"] = part["finish_reason"]
            for name in ("prompt_logprobs", "prompt_token_ids"):
                if name in part:
                    assert name not in choice, "reported twice"
                    choice[name] = part[name]
            if part["logprobs"] is not None:
                before = choice["logprobs"] or {name: [] for name in part["logprobs"]}
                choice["logprobs"] = {
                    name: None if values is None else before[name] + values for name, values in part["logprobs"].items()
                }
    return [made[index] for index in sorted(made)]


async def test_parameters_reach_the_engine_as_ids(serving: Serving, token_ids: TokenIds) -> None:
    async with serving("okay") as server:
        await server.complete(
            typical_p=0.7, allowed_token_ids=[5, 6, 250], bad_words=["ab", " c"], prompt_logprobs=2, logprobs=1
        )
        params = server.engine.streams[0].params
        assert params.typical_p == 0.7 and params.allowed_token_ids == (5, 6, 250)
        assert params.bad_words_token_ids == tuple(tuple(token_ids(text)) for text in ("ab", " ab", "c", " c"))
        assert (params.prompt_logprobs, params.logprobs) == (2, 1)
        await server.chat(typical_p=0.6, bad_words=["z"], prompt_logprobs=0, allowed_token_ids=[9])
        params = server.engine.streams[1].params
        assert params.bad_words_token_ids == tuple(tuple(token_ids(text)) for text in ("z", " z"))
        assert (params.typical_p, params.prompt_logprobs, params.allowed_token_ids) == (0.6, 0, (9,))


@pytest.mark.parametrize("route", ["complete", "chat"])
@pytest.mark.parametrize(
    ("fields", "part", "param"),
    [
        ({"allowed_token_ids": [1, 999]}, "allowed_token_ids: 999 ", "allowed_token_ids"),
        ({"prompt_logprobs": 21}, "prompt_logprobs: 21 exceeds the limit of 20", "prompt_logprobs"),
        ({"bad_words": ["ok", "  "]}, "bad_words: '  ' has no tokens", "bad_words"),
        ({"bad_words": ["x" * 65]}, "has 65 tokens; at most 64", "bad_words"),
        ({"min_tokens": 5, "max_tokens": 4}, "min_tokens: 5 exceeds the limit of 4", "min_tokens"),
        ({"min_tokens": 600}, "min_tokens: 600 exceeds the limit", "min_tokens"),
        ({"allowed_token_ids": [256], "min_tokens": 1}, "may forbid all of them", "allowed_token_ids"),
        ({"allowed_token_ids": [64], "bad_words": ["a"]}, "may forbid all of them", "allowed_token_ids"),
        (
            {"allowed_token_ids": [64], "stop_token_ids": [64], "min_tokens": 1, "ignore_eos": True},
            "may forbid all of them",
            "allowed_token_ids",
        ),
    ],
    ids=str,
)
async def test_contradictions_are_refused_before_anything_runs(
    serving: Serving, route: str, fields: dict[str, Any], part: str, param: str
) -> None:
    async with serving("ok") as server:
        response = await getattr(server, route)(**fields)
        error = response.json()["error"]
        assert (response.status_code, error["param"], error["type"]) == (400, param, "invalid_request_error")
        assert part in error["message"] and server.engine.streams == []


async def test_apparent_contradictions_are_accepted(serving: Serving) -> None:
    async with serving("ok") as server:
        for fields in (
            {"allowed_token_ids": [256]},
            {"allowed_token_ids": [256], "min_tokens": 1, "ignore_eos": True},
            {"allowed_token_ids": [64, 65], "bad_words": ["a"]},
            {"min_tokens": 4, "max_tokens": 4},
        ):
            assert (await server.complete(**fields)).status_code == 200


async def test_reports_of_long_prompts_are_bounded(serving: Serving) -> None:
    async with serving("ok") as server:
        prompts = [[5] * 500] * 24
        response = await server.complete(prompt=prompts, prompt_logprobs=20)
        assert response.status_code == 400
        error = response.json()["error"]
        assert error["param"] == "prompt_logprobs" and " 252000 " in error["message"]
        assert (await server.complete(prompt=prompts[:23], prompt_logprobs=20)).status_code == 200


@pytest.mark.parametrize("stream", [False, True])
async def test_prompt_logprobs_have_the_vllm_format(serving: Serving, token_ids: TokenIds, stream: bool) -> None:
    async with serving("ok") as server:
        answers = await completion(server, stream=stream, prompt=["aé", "b"], n=2, prompt_logprobs=1, max_tokens=2)
        first, second, third, fourth = (answer["prompt_logprobs"] for answer in answers)
        assert first == second and third == fourth == [None]
        assert first[0] is None and len(first) == 3
        other = {"logprob": -1.0, "rank": 1, "decoded_token": "!"}
        middle, last = (str(token) for token in token_ids("é"))
        assert first[1] == {middle: {"logprob": -0.5, "rank": 3, "decoded_token": "\ufffd"}, "0": other}
        assert first[2] == {last: {"logprob": -0.5, "rank": 3, "decoded_token": "\ufffd"}, "0": other}
        asked = [one.params.prompt_logprobs for one in server.engine.streams]
        assert asked == [1, None, 1, None], "the first of n reports for all"


async def test_chat_reports_its_prompt_once(serving: Serving, token_ids: TokenIds) -> None:
    async with serving("ok") as server:
        fields = {"prompt_logprobs": 0, "return_token_ids": True, "n": 2, "max_tokens": 2}
        whole = (await server.chat(**fields)).json()
        prompt = server.engine.streams[0].prompt
        assert whole["prompt_token_ids"] == prompt and len(whole["prompt_logprobs"]) == len(prompt)
        assert [choice["token_ids"] for choice in whole["choices"]] == [token_ids("ok")] * 2
        made = chunks((await server.chat(stream=True, **fields)).text)
        telling = [chunk for chunk in made if "prompt_logprobs" in chunk or "prompt_token_ids" in chunk]
        assert len(telling) == 1
        assert telling[0]["prompt_logprobs"] == whole["prompt_logprobs"]
        assert telling[0]["prompt_token_ids"] == prompt and telling[0]["choices"][0]["index"] == 0


@pytest.mark.parametrize("stream", [False, True])
async def test_echo_with_logprobs_begins_with_the_prompts(serving: Serving, stream: bool) -> None:
    async with serving("ok") as server:
        (answer,) = await completion(server, stream=stream, prompt="aéb", echo=True, logprobs=1, max_tokens=2)
        assert answer["text"] == "aébok"
        assert answer["logprobs"] == {
            "tokens": ["a", "bytes:\\xc3", "bytes:\\xa9", "b", "o", "k"],
            "token_logprobs": [None, -0.5, -0.5, -0.5, -0.25, -0.25],
            "top_logprobs": [
                None,
                {"bytes:\\xc3": -0.5, "!": -1.0},
                {"bytes:\\xa9": -0.5, "!": -1.0},
                {"b": -0.5, "!": -1.0},
                {"o": -0.25, "!": -1.0},
                {"k": -0.25, "!": -1.0},
            ],
            "text_offset": [0, 1, 1, 2, 3, 4],
        }
        assert "prompt_logprobs" not in answer


@pytest.mark.parametrize("stream", [False, True])
async def test_prompt_logprobs_work_with_zero_output_tokens(serving: Serving, stream: bool) -> None:
    async with serving("ok") as server:
        fields = {"prompt": "abc", "echo": True, "logprobs": 0, "max_tokens": 0}
        (answer,) = await completion(server, stream=stream, **fields)
        assert (answer["text"], answer["finish_reason"]) == ("abc", "length")
        assert answer["logprobs"]["token_logprobs"] == [None, -0.5, -0.5]
        assert answer["logprobs"]["top_logprobs"] == [None, {"b": -0.5}, {"c": -0.5}]
        usage = (await server.complete(**fields)).json()["usage"]
        assert (usage["prompt_tokens"], usage["completion_tokens"]) == (3, 0)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("echo", "drawn", "text", "offsets"),
    [
        (True, "é", "aé日é", [0, 1, 1, 2, 2, 2, 3, 3]),
        (True, "", "aé日", [0, 1, 1, 2, 2, 2]),
        (True, None, "aé\ufffd", [0, 1, 1, 2, 2]),
        (False, "é", "日é", [0, 1, 1]),
    ],
    ids=["echo", "echo and end", "echo alone", "answer"],
)
async def test_character_started_in_the_prompt_is_reported_once(
    serving: Serving, token_ids: TokenIds, stream: bool, echo: bool, drawn: str | None, text: str, offsets: list[int]
) -> None:
    character = token_ids("日")
    async with serving() as server:
        fields = {"prompt": token_ids("aé") + character[:2], "echo": echo, "logprobs": 0}
        limit = 0 if drawn is None else 1 + len(token_ids(drawn))
        asking = asyncio.create_task(completion(server, stream=stream, max_tokens=limit, **fields))
        sequence = await server.engine.stream()
        sequence.report_prompt()
        sequence.draw([*character[2:], *token_ids(drawn or "")], "length")
        (answer,) = await asking
        assert (answer["text"], answer["logprobs"]["text_offset"]) == (text, offsets)


async def test_hidden_special_tokens_of_an_echo_have_no_offset(serving: Serving) -> None:
    async with serving("k") as server:
        fields = {"prompt": "a<|eos|>b", "echo": True, "logprobs": 0, "max_tokens": 1}
        (hidden,) = await completion(server, stream=False, **fields)
        assert (hidden["text"], hidden["logprobs"]["text_offset"]) == ("abk", [0, 1, 1, 2])
        (shown,) = await completion(server, stream=False, skip_special_tokens=False, **fields)
        assert (shown["text"], shown["logprobs"]["text_offset"]) == ("a<|eos|>bk", [0, 1, 8, 9])


async def test_an_answer_read_before_the_prompts_report_waits_for_it(serving: Serving, token_ids: TokenIds) -> None:
    async with serving() as server:
        asking = asyncio.create_task(completion(server, stream=True, n=2, echo=True, logprobs=0, max_tokens=3))
        leader, other = await server.engine.stream(0), await server.engine.stream(1)
        other.draw(token_ids("x"))
        other.draw(token_ids("y"), "length")
        while server.engine.streams[1].unreported.qsize():
            await asyncio.sleep(0.001)
        leader.report_prompt()
        leader.draw(token_ids("z"), "length")
        first, second = await asking
        assert (first["text"], second["text"]) == ("Hiz", "Hixy")
        assert second["logprobs"]["tokens"] == ["H", "i", "x", "y"]
        assert second["finish_reason"] == "length"


async def test_seeds_repeat_per_request_and_differ_per_answer(serving: Serving) -> None:
    async with serving("ok") as server:
        for _ in range(2):
            await server.complete(n=20, seed=3)
        await server.complete(n=20, seed=4)
        seeds = [stream.params.seed for stream in server.engine.streams]
        assert seeds[:20] == seeds[20:40] and seeds[0] == 3 and seeds[40] == 4
        # A neighbouring seed has only other answers: none is the second of one and the first of another.
        assert len(set(seeds[:20] + seeds[40:])) == 40
        await server.chat(n=3)
        assert [stream.params.seed for stream in server.engine.streams[60:]] == [None] * 3


@pytest.mark.parametrize(
    ("fields", "kept"),
    [({"truncate_prompt_tokens": 3}, 3), ({"truncate_prompt_tokens": -1, "max_tokens": 12}, 500)],
    ids=str,
)
async def test_a_prompt_is_truncated_from_its_beginning(serving: Serving, fields: dict[str, Any], kept: int) -> None:
    async with serving("ok") as server:
        assert (await server.complete(prompt="x" * 600 + "end", **fields)).status_code == 200
        prompt = server.engine.streams[0].prompt
        assert len(prompt) == kept and server.context.tokenizer.decode(prompt[-3:]) == "end"
