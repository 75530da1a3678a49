"""The requests of a differential run: a seeded draw over the routes and fields that quire shares with vLLM."""

import json
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from pydantic import BaseModel, Field

Comparison = Literal["equal", "shape", "valid", "status"]
"""The common part of two answers: all; all but drawn text and logprobs; a valid text; the status."""

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
MODEL = "model"

_OPENINGS = (
    "What is a list in Python?",
    "Explain dictionaries.",
    "The following example shows",
    "A generator is",
    "How do I open a file?",
    "import os\n\ndef main():\n",
    "Déjà vu, naïve café: 東京 🙂",
    "   leading spaces and\ttabs",
    "1 + 1 = 2, 2 + 2 =",
    "Return a new",
)
_SYSTEM = ("You are a helpful assistant.", "You answer questions about Python.")
_RUNNING_USAGE = {"include_usage": True, "continuous_usage_stats": True}
_STOPS = (".", " the", "\n", "Python", "a ", "is")


class Person(BaseModel, extra="forbid"):
    """The object that constrained answers describe."""

    name: str = Field(max_length=12)
    age: int = Field(ge=0, le=99)


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """A request, the family of requests that it belongs to, and what must agree in its answers."""

    family: str
    path: str
    body: Mapping[str, Any] | str
    """A string is sent as it is, so that it may be invalid JSON."""
    comparison: Comparison = "equal"


@dataclass(frozen=True, slots=True)
class Limits:
    """The limits of the model."""

    vocabulary: int
    context: int


Family = Callable[[random.Random, Limits], Asked]


def draw(count: int, *, seed: int, limits: Limits) -> list[Asked]:
    """Return ``count`` requests, as many of each family as possible; the invalid ones take a fifth."""
    source = random.Random(seed)
    invalid = invalid_requests(limits)
    asked = [invalid[number % len(invalid)] for number in range(count // 5)]
    asked += [FAMILIES[number % len(FAMILIES)](source, limits) for number in range(count - len(asked))]
    return asked


def _opening(source: random.Random) -> str:
    return " ".join(source.sample(_OPENINGS, source.randint(1, 3)))


def _completion(family: str, source: random.Random, comparison: Comparison = "equal", **fields: Any) -> Asked:
    body = {"model": MODEL, "prompt": _opening(source), "max_tokens": source.randint(1, 32), "temperature": 0}
    return Asked(family=family, path=COMPLETIONS, body=body | fields, comparison=comparison)


def _conversation(source: random.Random) -> list[dict[str, str]]:
    messages = [{"role": "system", "content": source.choice(_SYSTEM)}] if source.random() < 0.5 else []
    for _ in range(source.randint(0, 2)):
        messages += [{"role": "user", "content": _opening(source)}, {"role": "assistant", "content": _opening(source)}]
    return [*messages, {"role": "user", "content": _opening(source)}]


def _chat(family: str, source: random.Random, comparison: Comparison = "equal", **fields: Any) -> Asked:
    body = {"model": MODEL, "messages": _conversation(source), "temperature": 0}
    body |= {"max_completion_tokens": source.randint(1, 32)}
    return Asked(family=family, path=CHAT, body=body | fields, comparison=comparison)


def _ids(source: random.Random, limits: Limits) -> list[int]:
    return [source.randrange(3, limits.vocabulary) for _ in range(source.randint(1, 40))]


def _penalties(source: random.Random) -> dict[str, Any]:
    return {
        "presence_penalty": source.choice((-1.0, 0.0, 0.5, 2.0)),
        "frequency_penalty": source.choice((-0.5, 0.0, 0.5, 2.0)),
        "repetition_penalty": source.choice((0.8, 1.0, 1.3)),
    }


def _bias(source: random.Random, limits: Limits) -> dict[str, int]:
    return {str(source.randrange(limits.vocabulary)): source.choice((-100, 5, 100))}


def _in_parts(source: random.Random) -> list[dict[str, Any]]:
    return [{"role": "user", "content": [{"type": "text", "text": _opening(source)}]}]


def _sampled(source: random.Random) -> dict[str, Any]:
    drawn = {"temperature": source.choice((0.5, 1.0, 1.5)), "seed": source.randrange(1000)}
    choices: Sequence[tuple[str, Any]] = (("top_p", 0.8), ("top_k", 20), ("min_p", 0.1), ("top_k", -1))
    return drawn | dict([source.choice(choices)])


FAMILIES: tuple[Family, ...] = (
    lambda s, _: _completion("completion", s),
    lambda s, limits: _completion("completion of token ids", s, prompt=_ids(s, limits)),
    lambda s, _: _completion("completion of several prompts", s, prompt=[_opening(s) for _ in range(s.randint(2, 3))]),
    lambda s, _: _completion("completion with logprobs", s, logprobs=s.randint(0, 5)),
    lambda s, _: _completion("completion with echo", s, echo=True, logprobs=s.choice((None, 0, 2))),
    lambda s, _: _completion("echo without answer", s, echo=True, max_tokens=0, logprobs=s.choice((None, 1))),
    lambda s, _: _completion("completion with n", s, n=s.randint(2, 3)),
    lambda s, _: _completion("stop strings", s, stop=s.sample(_STOPS, s.randint(1, 3)), max_tokens=40),
    lambda s, _: _completion("stop strings kept", s, stop=s.choice(_STOPS), include_stop_str_in_output=True),
    lambda s, limits: _completion("stop token ids", s, stop_token_ids=s.sample(range(limits.vocabulary), 400)),
    lambda s, _: _completion("end of sequence ignored", s, ignore_eos=True),
    lambda s, _: _completion("least tokens", s, min_tokens=20, max_tokens=30, stop="."),
    lambda s, _: _completion("penalties", s, **_penalties(s)),
    lambda s, limits: _completion("logit bias", s, logit_bias=_bias(s, limits)),
    lambda s, limits: _completion("allowed tokens", s, allowed_token_ids=s.sample(range(limits.vocabulary), 8)),
    lambda s, _: _completion("bad words", s, bad_words=["the", "a"]),
    lambda s, _: _completion("prompt logprobs", s, prompt_logprobs=s.randint(0, 3)),
    lambda s, _: _completion("truncated prompt", s, truncate_prompt_tokens=s.randint(1, 12)),
    lambda s, _: _completion("stream", s, stream=True, stream_options={"include_usage": True}),
    lambda s, _: _completion("stream of several", s, stream=True, n=2, logprobs=s.choice((None, 1))),
    lambda s, _: _completion("running usage", s, stream=True, stream_options=_RUNNING_USAGE),
    lambda s, _: _completion("special tokens", s, skip_special_tokens=False, prompt=[0, 5, 1, 2, 7]),
    lambda s, _: _completion("token ids returned", s, return_token_ids=True),
    lambda s, _: _completion("tokens as ids", s, logprobs=1, return_tokens_as_token_ids=True),
    lambda s, _: _completion("sampled completion", s, "shape", ignore_eos=True, **_sampled(s)),
    lambda s, _: _chat("chat", s),
    lambda s, _: _chat("chat with logprobs", s, logprobs=True, top_logprobs=s.choice((None, 0, 3))),
    lambda s, _: _chat("chat stream", s, stream=True, stream_options={"include_usage": True}),
    lambda s, _: _chat("chat stream with logprobs", s, stream=True, logprobs=True, top_logprobs=1),
    lambda s, _: _chat("chat with n", s, n=2, stop=s.choice(_STOPS)),
    lambda s, _: _chat("chat without prompt for an answer", s, add_generation_prompt=False),
    lambda s, _: _chat("answer continued", s, add_generation_prompt=False, continue_final_message=True),
    lambda s, _: _chat("chat with echo", s, echo=True),
    lambda s, _: _chat("parts of text", s, messages=_in_parts(s)),
    lambda s, _: _chat("sampled chat", s, "shape", ignore_eos=True, **_sampled(s)),
    lambda s, _: _chat("JSON schema", s, "valid", max_completion_tokens=120, response_format=_response_format()),
    lambda s, _: _chat("choice", s, "valid", structured_outputs={"choice": ["yes", "no"]}),
    lambda s, _: _completion("regular expression", s, "valid", structured_outputs={"regex": "[0-9]{3}-[a-f]{2}"}),
    lambda s, _: Asked(family="tokenize", path="/tokenize", body={"model": MODEL, "prompt": _opening(s)}),
    lambda s, _: Asked(family="tokenize a chat", path="/tokenize", body={"model": MODEL, "messages": _conversation(s)}),
    lambda s, limits: Asked(family="detokenize", path="/detokenize", body={"model": MODEL, "tokens": _ids(s, limits)}),
)  # fmt: skip


def _response_format() -> dict[str, Any]:
    return {
        "type": "json_schema",
        "json_schema": {"name": "person", "schema": Person.model_json_schema(), "strict": True},
    }


def invalid_requests(limits: Limits) -> list[Asked]:
    """Return requests that one field makes invalid, or nearly so; only the statuses of their answers are compared."""
    completion = {"model": MODEL, "prompt": "A list is", "max_tokens": 4, "temperature": 0}
    chat = {"model": MODEL, "messages": [{"role": "user", "content": "Hello"}], "max_completion_tokens": 4}
    cases = [(COMPLETIONS, completion | changes) for changes in _INVALID_SAMPLING]
    cases += [(COMPLETIONS, completion | changes) for changes in _INVALID_COMPLETIONS]
    cases += [
        (COMPLETIONS, completion | {"prompt": [limits.vocabulary]}),
        (COMPLETIONS, completion | {"prompt": [5] * (limits.context + 1)}),
        (COMPLETIONS, completion | {"prompt": [5] * limits.context}),
        (COMPLETIONS, completion | {"max_tokens": limits.context}),
        (COMPLETIONS, completion | {"allowed_token_ids": [limits.vocabulary]}),
        (COMPLETIONS, completion | {"logit_bias": {str(limits.vocabulary): 1}}),
    ]
    cases += [(CHAT, chat | changes) for changes in _INVALID_CHATS]
    texts = ["{", "[]", "null", json.dumps({"model": MODEL}), ""]
    asked = [Asked(family=_named(path, body), path=path, body=body, comparison="status") for path, body in cases]
    asked += [Asked(family=f"body {text!r}", path=COMPLETIONS, body=text, comparison="status") for text in texts]
    return asked


def _named(path: str, body: Mapping[str, Any]) -> str:
    """Name the request by its unusual fields."""
    usual = {"model": MODEL, "prompt": "A list is", "max_tokens": 4, "temperature": 0, "max_completion_tokens": 4}
    changed = {name: value for name, value in body.items() if name not in usual or usual[name] != value}
    if changed.get("messages") == [{"role": "user", "content": "Hello"}]:
        del changed["messages"]
    text = json.dumps(changed)
    return f"{path.removeprefix('/v1/')} {text if len(text) <= 90 else text[:87] + '...'}"


_INVALID_SAMPLING: tuple[dict[str, Any], ...] = (
    {"temperature": -0.1},
    {"temperature": 2.5},
    {"temperature": "hot"},
    {"top_p": 0},
    {"top_p": 1.1},
    {"top_k": -2},
    {"top_k": 0},
    {"min_p": 1.5},
    {"n": 0},
    {"n": -1},
    {"n": 2, "temperature": 0},
    {"presence_penalty": 2.5},
    {"frequency_penalty": -3},
    {"repetition_penalty": 0},
    {"seed": -1},
    {"seed": "x"},
    {"stop": []},
    {"stop": [""]},
    {"stop": ["a", "b", "c", "d", "e"]},
    {"stop_token_ids": ["a"]},
    {"max_tokens": 0},
    {"max_tokens": -1},
    {"max_tokens": None},
    {"min_tokens": 10, "max_tokens": 5},
    {"min_tokens": -1},
    {"logit_bias": {"x": 1}},
    {"logit_bias": {"5": 200}},
    {"allowed_token_ids": []},
    {"bad_words": [""]},
)
_INVALID_COMPLETIONS: tuple[dict[str, Any], ...] = (
    {"model": "unknown"},
    {"model": None},
    {"prompt": ""},
    {"prompt": []},
    {"prompt": None},
    {"prompt": [[]]},
    {"prompt": [-1]},
    {"prompt": {"a": 1}},
    {"logprobs": -1},
    {"logprobs": 30},
    {"prompt_logprobs": -2},
    {"suffix": "end"},
    {"stream": True, "prompt_logprobs": 1},
    {"stream_options": {"include_usage": True}},
    {"truncate_prompt_tokens": 0},
    {"truncate_prompt_tokens": -1},
    {"truncate_prompt_tokens": 1_000_000},
    {"user": "user-1"},
    {"unknown_field": 1},
    {"structured_outputs": {"regex": "("}},
    {"structured_outputs": {"choice": []}},
    {"structured_outputs": {"regex": "a", "choice": ["b"]}},
    {"response_format": {"type": "json_schema"}},
)
_INVALID_CHATS: tuple[dict[str, Any], ...] = (
    {"messages": []},
    {"messages": None},
    {"messages": [{"role": "wizard", "content": "Hello"}]},
    {"messages": [{"role": "user"}]},
    {"messages": [{"role": "user", "content": None}]},
    {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
    {"messages": [{"role": "user", "content": 5}]},
    {"messages": [{"role": "assistant", "content": "Hello"}]},
    {"messages": "Hello"},
    {"top_logprobs": 2},
    {"logprobs": True, "top_logprobs": -1},
    {"logprobs": True, "top_logprobs": 30},
    {"max_completion_tokens": 0},
    {"add_generation_prompt": True, "continue_final_message": True},
    {"tools": []},
    {"tool_choice": "auto"},
    {"tool_choice": "required"},
    {"tools": [{"type": "function", "function": {"name": "f"}}], "tool_choice": "maybe"},
    {"response_format": {"type": "yaml"}},
    {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "nothing"}}}},
    {"chat_template_kwargs": {"enable_thinking": False}},
    {"reasoning_effort": "low"},
    {"modalities": ["audio"]},
    {"n": 1000},
)
