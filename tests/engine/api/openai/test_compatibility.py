"""The usual requests of OpenAI's and vLLM's clients are accepted, and changed values are reported."""

import asyncio
import json
from collections.abc import Callable
from typing import Any

import httpx
import pytest
import tokenizers
from tokenizers import models, processors

from quire_engine.api.limits import ModelLimits, checked_prompt
from quire_engine.api.output import Choice, StopRules, new_choice
from quire_engine.api.schemas import CompletionRequest
from quire_engine.core.batch import FinishedSequence
from quire_engine.errors import Unavailable
from quire_engine.text.tokenizer import Tokenizer

Serving = Callable[..., Any]
TokenIds = Callable[[str], list[int]]


# --- the length of answers and prompts ---


async def test_max_tokens_beyond_the_room_is_cut_with_a_header(serving: Serving) -> None:
    async with serving("ok") as server:
        for answer in (await server.complete(max_tokens=4095), await server.chat(max_tokens=100_000, stream=True)):
            assert answer.status_code == 200
        prompts = [len(stream.prompt) for stream in server.engine.streams]
        assert [stream.params.max_tokens for stream in server.engine.streams] == [512 - length for length in prompts]
        assert answer.headers["x-quire-max-tokens"] == str(512 - prompts[1])
        assert "x-quire-max-tokens" not in (await server.complete(max_tokens=5)).headers
        refusal = await server.complete(prompt="x" * 512, max_tokens=1)
        assert refusal.status_code == 400 and refusal.json()["error"]["code"] == "context_length_exceeded"


def bos_tokenizer() -> Tokenizer:
    backend = tokenizers.Tokenizer(models.BPE(vocab={"<s>": 0, "a": 1, "b": 2}, merges=[]))
    backend.add_special_tokens(["<s>"])
    backend.post_processor = processors.TemplateProcessing("<s> $A", special_tokens=[("<s>", 0)])
    return Tokenizer(backend, {"bos_token": "<s>"})


@pytest.mark.parametrize(
    ("prompt", "fields", "kept"),
    [
        ([0, 1, 2, 1, 2], {"truncate_prompt_tokens": 3}, [0, 1, 2]),
        ([0, 1, 2, 1, 1], {"truncate_prompt_tokens": 1}, [1]),
        ([0, 1, 2, 1, 1], {"truncate_prompt_tokens": 3, "truncation_side": "left"}, [0, 1, 1]),
        ([0, 1, 2, 1, 1], {"truncate_prompt_tokens": 3, "truncation_side": "right"}, [0, 1, 2]),
        ([1, 2, 1, 1], {"truncate_prompt_tokens": 3}, [2, 1, 1]),
        ([0, 1, 2], {"truncate_prompt_tokens": 3}, [0, 1, 2]),
        ([0, *[1] * 9], {"truncate_prompt_tokens": -1}, [0, *[1] * 6]),
    ],
)
def test_the_first_token_survives_truncation(prompt: list[int], fields: dict[str, Any], kept: list[int]) -> None:
    limits = ModelLimits(
        max_model_len=8,
        vocab_size=3,
        eos_token_ids=(),
        max_logprobs=0,
        first_token_id=bos_tokenizer().first_token_id,
        priorities=False,
    )
    body = CompletionRequest.model_validate({"prompt": "x", **fields})
    assert checked_prompt(prompt, body, 1, limits) == kept


# --- fields ---


@pytest.mark.parametrize(
    "fields",
    [
        {"kv_transfer_params": None, "mm_processor_kwargs": None, "prompt_embeds": None, "thinking_token_budget": None},
        {"vllm_xargs": {}, "some_new_field": None, "another": [], "and_another": {}, "and_text": ""},
        {"request_id": "r-1", "session_id": "s", "length_penalty": 1.0, "early_stopping": False},
        {"spaces_between_special_tokens": True, "truncation_side": "left", "detokenize": True},
        {"return_tokens_as_token_ids": False, "return_token_offsets": False, "routed_experts_prompt_start": 0},
        {"echo": False, "model": None},
    ],
)
async def test_fields_without_an_effect_are_accepted_on_both_routes(serving: Serving, fields: dict[str, Any]) -> None:
    async with serving("ok") as server:
        for answer in (await server.chat(**fields), await server.complete(**fields)):
            assert answer.status_code == 200, answer.text


@pytest.mark.parametrize(
    "fields",
    [
        {"include_reasoning": True, "verbosity": "low", "top_logprobs": 0},
        {"reasoning_effort": "high", "enable_thinking": False},
        {"messages": [{"role": "user", "content": "Hi", "id": 7, "cache_control": {"type": "ephemeral"}}]},
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "Hi", "cache_control": {"type": "x"}}]}]},
        {"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": None, "audio": {"id": "a"}}]},
    ],
)
async def test_extra_fields_of_chat_clients_are_accepted(serving: Serving, fields: dict[str, Any]) -> None:
    async with serving("ok") as server:
        answer = await server.chat(**fields)
        assert answer.status_code == 200, answer.text


@pytest.mark.parametrize(
    ("field", "near"), [("max_token", "max_tokens"), ("temprature", "temperature"), ("stops", "stop")]
)
async def test_misspelled_field_is_refused_with_a_suggestion(serving: Serving, field: str, near: str) -> None:
    async with serving("ok") as server:
        error = (await server.complete(**{field: 5})).json()["error"]
        assert error["param"] == field and error["message"].endswith(f"did you mean {near}?")


async def test_a_request_without_a_model_gets_the_served_one(serving: Serving) -> None:
    async with serving("ok") as server:
        answer = await server.http.post("/v1/completions", json={"prompt": "Hi"})
        assert answer.status_code == 200 and answer.json()["model"] == "demo"
        assert (await server.complete(model="alias")).json()["model"] == "demo"


async def test_reasoning_fields_reach_the_chat_template(serving: Serving) -> None:
    template = "{{ reasoning_effort }} {{ enable_thinking }}"
    async with serving("ok", template=template) as server:
        await server.chat(reasoning_effort="low", enable_thinking=True)
        await server.chat(reasoning_effort="low", chat_template_kwargs={"reasoning_effort": "high"})
        prompts = [server.context.tokenizer.decode(stream.prompt) for stream in server.engine.streams]
        assert prompts == ["low True", "high "]


# --- usage and stop reasons ---


async def test_cached_tokens_are_reported_from_the_first_chunk_on(serving: Serving, token_ids: TokenIds) -> None:
    async with serving() as server:
        usage = {"include_usage": True, "continuous_usage_stats": True}
        asking = asyncio.create_task(server.complete(stream=True, stream_options=usage, stop="!"))
        stream = await server.engine.stream()
        stream.starts(cached=32)
        stream.draw(token_ids("a"))
        stream.draw(token_ids("b!"))
        events = [json.loads(block[6:]) for block in (await asking).text.split("\n\n") if block.startswith("data: {")]
        assert {event["usage"]["prompt_tokens_details"]["cached_tokens"] for event in events} == {32}
        assert events[-2]["choices"][0]["stop_reason"] == "!"


@pytest.mark.parametrize(("stop_id", "given", "reason"), [(7, (), None), (8, (), 8), (7, (7,), 7), (9, (9,), 9)])
def test_additional_eos_tokens_are_stop_reasons(stop_id: int, given: tuple[int, ...], reason: int | None) -> None:
    choice: Choice = new_choice(bos_tokenizer(), 0, [1], StopRules(), given, 7)
    delta = choice.append_tokens([1, stop_id], None, FinishedSequence(1, "stop", stop_id))
    assert delta is not None and (delta.finish_reason, delta.stop_reason) == ("stop", reason)


# --- long inputs cost little ---


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/v1/completions", {"prompt": [1] * 513}, "prompt"),
        ("/v1/completions", {"prompt": [[1], [1] * 513]}, "prompt"),
        ("/detokenize", {"tokens": [1] * 513}, "tokens"),
        ("/tokenize", {"messages": [{"role": "user", "content": ""}] * 513}, "messages"),
    ],
)
async def test_arrays_longer_than_the_context_are_refused_by_length(
    serving: Serving, path: str, body: dict[str, Any], param: str
) -> None:
    async with serving("ok") as server:
        error = (await server.http.post(path, json=body)).json()["error"]
        assert (error["param"], error["code"]) == (param, "context_length_exceeded")


async def test_prompts_beyond_the_queue_are_refused_by_number(serving: Serving) -> None:
    async with serving("ok") as server:
        refusal = await server.complete(prompt=[[1]] * 1025)
        assert refusal.status_code == 400 and "1025 sequences" in refusal.json()["error"]["message"]


async def test_bodies_beyond_the_budget_get_503(serving: Serving) -> None:
    async with serving("ok", body_memory_bytes=1000) as server:
        refusal = await server.complete(prompt="x" * 2000)
        assert refusal.status_code == 503 and refusal.json()["error"]["code"] == "too_many_bodies"
        assert int(refusal.headers["retry-after"]) >= 1
        assert (await server.complete()).status_code == 200 and server.context.bodies.held == 0


async def test_many_unstreamed_choices_are_joined_as_they_arrive(serving: Serving, token_ids: TokenIds) -> None:
    async with serving() as server:
        asking = asyncio.create_task(server.chat(n=3, return_token_ids=True))
        for number in range(3):
            stream = await server.engine.stream(number)
            for letter in "abcdef":
                stream.draw(token_ids(letter))
            stream.draw(token_ids(str(number)), "length")
        choices = (await asking).json()["choices"]
        assert [choice["message"]["content"] for choice in choices] == ["abcdef0", "abcdef1", "abcdef2"]
        assert [choice["token_ids"] for choice in choices] == [token_ids(f"abcdef{number}") for number in range(3)]


# --- keep-alive ---


async def test_a_stream_begins_with_comments_while_it_waits(serving: Serving, token_ids: TokenIds) -> None:
    async with serving(sse_keepalive_seconds=0.05) as server:
        body = {"model": "demo", "prompt": "Hi", "stream": True}
        async with server.http.stream("POST", "/v1/completions", json=body) as response:
            assert response.status_code == 200
            blocks = response.aiter_text()
            assert await anext(blocks) == ": keep-alive\n\n"
            assert await anext(blocks) == ": keep-alive\n\n"
            stream = await server.engine.stream()
            stream.draw(token_ids("a"), "length")
            rest = "".join([block async for block in blocks])
            assert '"text":"a"' in rest and rest.endswith("data: [DONE]\n\n")


async def test_a_failure_after_a_comment_is_an_error_event(serving: Serving) -> None:
    async with serving(sse_keepalive_seconds=0.05) as server:
        body = {"model": "demo", "prompt": "Hi", "stream": True}
        async with server.http.stream("POST", "/v1/completions", json=body) as response:
            blocks = response.aiter_text()
            rest = await anext(blocks)
            assert rest.startswith(": keep-alive\n\n")
            (await server.engine.stream()).breaks(Unavailable("gone", code="engine_stopped"))
            with pytest.raises(httpx.RemoteProtocolError, match="incomplete"):
                async for block in blocks:
                    rest += block
            assert "event: error\n" in rest and "engine_stopped" in rest
        asking = asyncio.create_task(server.complete(stream=False))
        stream = await server.engine.stream(1)
        await asyncio.sleep(0.1)
        stream.breaks(Unavailable("gone", code="engine_stopped"))
        assert (await asking).status_code == 503
        assert server.context.lifecycle.in_flight == 0


async def test_logprobs_of_zero_name_the_sampled_token(serving: Serving) -> None:
    async with serving("ok") as server:
        logprobs = (await server.complete(logprobs=0)).json()["choices"][0]["logprobs"]
        assert logprobs["top_logprobs"][:2] == [{"o": -0.25}, {"k": -0.25}]
