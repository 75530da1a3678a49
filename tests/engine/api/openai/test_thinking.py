"""Budgets of reasoning and constraints after it: what reaches the engine, and how answers are read."""

import json
from collections.abc import Callable
from typing import Any

import pytest
import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from quire_engine.core.sampling_params import ReasoningPhase
from quire_engine.text.tokenizer import Tokenizer

Serving = Callable[..., Any]

TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
    "{% if enable_thinking is false %}<think>\n\n</think>\n{% elif enable_thinking %}<think>\n{% endif %}"
    "{{ '</think>' if false }}"
)
FORMAT = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "object"}}}


@pytest.fixture
def tagged(serving: Serving, monkeypatch: pytest.MonkeyPatch) -> tuple[int, int]:
    """Let the server's tokenizer have the tags as tokens, and return their ids."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = tokenizers.Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(alphabet)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["<|eos|>"])
    backend.add_special_tokens(["<think>", "</think>", "<tool_call>", "</tool_call>"])
    monkeypatch.setitem(serving.__globals__, "TOKENIZER", Tokenizer(backend, {"eos_token": "<|eos|>"}))
    return 257, 258


@pytest.mark.parametrize(
    ("thinking", "opened", "optional"), [(True, True, True), (False, False, False), (None, False, True)]
)
async def test_constraint_starts_after_the_reasoning(
    serving: Serving, tagged: tuple[int, int], thinking: bool | None, opened: bool, optional: bool
) -> None:
    says = 'Hm.</think>{"a":1}' if thinking else '{"a":1}'
    async with serving(says, template=TEMPLATE) as server:
        fields = {"response_format": FORMAT, "enable_thinking": thinking}
        message = (await server.chat(**fields)).json()["choices"][0]["message"]
        assert message["content"] == '{"a":1}' and message.get("reasoning_content") == ("Hm." if thinking else None)
        phase = server.engine.streams[0].params.reasoning_phase
        assert phase == ReasoningPhase(
            start_token_id=tagged[0], end_token_id=tagged[1], opened=opened, optional=optional, budget=None
        )
        assert "object" in server.context.grammars.specs[0].text


async def test_a_budget_reaches_the_engine_without_a_constraint(serving: Serving, tagged: tuple[int, int]) -> None:
    async with serving("Hm.</think>Hello", template=TEMPLATE) as server:
        answer = (await server.chat(enable_thinking=True, thinking_token_budget=64)).json()
        assert answer["choices"][0]["message"]["content"] == "Hello"
        params = server.engine.streams[0].params
        assert params.reasoning_phase.budget == 64 and params.grammar is None
        await server.chat(enable_thinking=True)
        assert server.engine.streams[1].params.reasoning_phase is None


async def test_a_budget_of_anthropics_api_reaches_the_engine(serving: Serving, tagged: tuple[int, int]) -> None:
    async with serving("Hm.</think>Hello", template=TEMPLATE) as server:
        body = {"model": "demo", "max_tokens": 50, "messages": [{"role": "user", "content": "Hi"}]}
        thinking = {"type": "enabled", "budget_tokens": 32}
        answer = await server.http.post("/v1/messages", json={**body, "thinking": thinking})
        assert [block["type"] for block in answer.json()["content"]] == ["thinking", "text"]
        assert server.engine.streams[0].params.reasoning_phase.budget == 32


async def test_a_budget_without_tags_is_refused_by_chats_only(serving: Serving) -> None:
    async with serving("Hello", template=TEMPLATE) as server:
        answer = await server.chat(thinking_token_budget=64)
        assert answer.status_code == 400 and answer.json()["error"]["param"] == "thinking_token_budget"
        body = {"model": "demo", "max_tokens": 50, "messages": [{"role": "user", "content": "Hi"}]}
        thinking = {"type": "enabled", "budget_tokens": 32}
        assert (await server.http.post("/v1/messages", json={**body, "thinking": thinking})).status_code == 200


@pytest.mark.parametrize("budget", [-1, 1.5, "many"])
async def test_a_budget_is_a_natural_number(serving: Serving, budget: Any) -> None:
    async with serving("Hello", template=TEMPLATE) as server:
        answer = await server.chat(thinking_token_budget=budget)
        assert answer.status_code == 400 and "thinking_token_budget" in json.dumps(answer.json())


@pytest.mark.parametrize(
    ("thinking", "fields", "param"),
    [
        (True, {"allowed_token_ids": [65, 66]}, "allowed_token_ids"),
        (None, {"allowed_token_ids": [65, 257]}, "allowed_token_ids"),
        (True, {"bad_words": ["</think>"]}, "bad_words"),
        (True, {"bad_words": ["x</think>"]}, "bad_words"),
        (True, {"stop_token_ids": [258], "min_tokens": 9}, "min_tokens"),
        (True, {"stop_token_ids": [258], "min_tokens": 8}, None),
        (True, {"allowed_token_ids": [65, 258]}, None),
        (None, {"allowed_token_ids": [65, 66]}, None),
        (False, {"bad_words": ["</think>"]}, None),
        (True, {"bad_words": ["</think>x"]}, None),
    ],
)
async def test_a_budget_needs_an_end_tag_that_may_be_sampled(
    serving: Serving, tagged: tuple[int, int], thinking: bool | None, fields: dict[str, Any], param: str | None
) -> None:
    """A prompt without the reasoning, or a start tag that may not be sampled, needs no end tag."""
    async with serving("A", template=TEMPLATE) as server:
        answer = await server.chat(enable_thinking=thinking, thinking_token_budget=8, **fields)
        assert answer.status_code == (200 if param is None else 400)
        assert param is None or answer.json()["error"]["param"] == param
        assert (await server.chat(enable_thinking=thinking, **fields)).status_code == 200


TOOL_TEMPLATE = TEMPLATE + '{{ tools if false }}{{ \'<tool_call>{"name": n, "arguments": a}</tool_call>\' if false }}'
TOOL = {"type": "function", "function": {"name": "f"}}
CALL = '<tool_call>{"name": "f", "arguments": {}}</tool_call>'
MENTION = "I write <tool_call> then."


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("says", "reasoning", "content", "num_tokens"),
    [
        (f"{MENTION}</think>Done.", MENTION, "Done.", 15),
        (f"{MENTION}</think>Done.{CALL}", MENTION, "Done.", 15),
        (f"{MENTION}{CALL}", MENTION, None, 15),
        (f"Hm.{CALL}{CALL}", "Hm.", None, 3),
        (MENTION, MENTION, None, 16),  # with the end-of-sequence token
    ],
)
async def test_reasoning_that_mentions_a_call_is_counted(
    serving: Serving,
    tagged: tuple[int, int],
    says: str,
    reasoning: str,
    content: str | None,
    num_tokens: int,
    stream: bool,
) -> None:
    async with serving(says, template=TOOL_TEMPLATE) as server:
        fields: dict[str, Any] = {"tools": [TOOL], "enable_thinking": True}
        if stream:
            response = await server.chat(**fields, stream=True, stream_options={"include_usage": True})
            chunks = [json.loads(line[6:]) for line in response.text.splitlines() if line.startswith("data: {")]
            deltas = [chunk["choices"][0]["delta"] for chunk in chunks if chunk["choices"]]
            usage = chunks[-1]["usage"]
            found = {key: "".join(delta.get(key) or "" for delta in deltas) for key in ("reasoning", "content")}
        else:
            answer = (await server.chat(**fields)).json()
            found, usage = answer["choices"][0]["message"], answer["usage"]
        assert (found["reasoning"], found["content"] or None) == (reasoning, content)
        assert usage["completion_tokens_details"]["reasoning_tokens"] == num_tokens
