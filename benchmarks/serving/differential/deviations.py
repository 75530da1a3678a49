"""The comparison of two answers to one request: pure functions that return what deviates."""

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import pydantic

from benchmarks.serving.differential.answers import Answer
from benchmarks.serving.differential.asked import Asked, Person

LOGPROB_TOLERANCE = 2e-3
NEAR_TIE = 1e-2
"""Greedy answers may part where the two best tokens have logprobs this close."""

_PRIVATE = frozenset(
    {
        *("id", "created", "model", "object", "system_fingerprint", "service_tier", "kv_transfer_params"),
        "prompt_tokens_details",
    }
)
"""Fields that name the answer or the server, and one that vLLM writes only with a flag."""


@dataclass(frozen=True, slots=True)
class Deviation:
    """A field that differs, with both values."""

    field: str
    quire: Any
    peer: Any


def deviations(asked: Asked, quire: Answer, peer: Answer) -> list[Deviation]:
    """Return what differs between the answers, in the fields that the request compares."""
    if quire.status != peer.status:
        return [Deviation("status", _status(quire), _status(peer))]
    if asked.comparison == "status" or quire.status != 200:
        return []
    if asked.comparison == "valid":
        return [
            Deviation(f"choices[{place}].text", _text(choice), "valid")
            for place, choice in enumerate(quire.content["choices"])
            if not valid(asked, _text(choice))
        ]
    found = list(_differences("", _result(quire.content), _result(peer.content)))
    if asked.comparison == "shape":
        drawn = ("text", "content", "logprobs", "token_ids")
        found = [each for each in found if not any(word in each.field for word in drawn)]
    return found


def parting(quire: Answer, peer: Answer) -> float | None:
    """Return how close the two best tokens were where the answers first part; None if unknown or without a parting.

    Both answers are of the route for completions, with two logprobs per token.
    """
    if quire.status != 200 or peer.status != 200:
        return None
    ours, theirs = (answer.content["choices"][0]["logprobs"] for answer in (quire, peer))
    for place, (mine, other) in enumerate(zip(ours["tokens"], theirs["tokens"], strict=False)):
        if mine != other:
            alternatives = ours["top_logprobs"][place]
            if other not in alternatives or mine not in alternatives:
                return math.inf
            return abs(alternatives[mine] - alternatives[other])
    return None


def valid(asked: Asked, text: str) -> bool:
    """Return whether an answer obeys the constraint of the request."""
    assert isinstance(asked.body, Mapping)
    constraint = asked.body.get("structured_outputs")
    if constraint is None:
        try:
            Person.model_validate_json(text, strict=True)
        except pydantic.ValidationError:
            return False
        return True
    if "choice" in constraint:
        return text in constraint["choice"]
    # The answer may be cut by its length.
    return re.fullmatch(constraint["regex"], text) is not None or len(text) < 6


def _status(answer: Answer) -> str:
    return f"{answer.status} {answer.message}".strip()


def _text(choice: Mapping[str, Any]) -> str:
    message = choice.get("message")
    return str(choice.get("text") if message is None else message.get("content"))


def _result(content: Any) -> Any:
    """Return the answer without private fields, and without fields that are null or empty, which mean their absence."""
    if isinstance(content, dict):
        kept = {name: _result(value) for name, value in content.items() if name not in _PRIVATE}
        return {name: value for name, value in kept.items() if value not in (None, [], {})}
    if isinstance(content, list):
        return [_result(value) for value in content]
    return content


def _differences(path: str, quire: Any, peer: Any) -> Iterator[Deviation]:
    if isinstance(quire, dict) and isinstance(peer, dict):
        for name in sorted({*quire, *peer}):
            yield from _differences(f"{path}.{name}" if path else name, quire.get(name), peer.get(name))
    elif isinstance(quire, list) and isinstance(peer, list) and len(quire) == len(peer):
        for place, pair in enumerate(zip(quire, peer, strict=True)):
            yield from _differences(f"{path}[{place}]", *pair)
    elif isinstance(quire, float) and isinstance(peer, (int, float)):
        if not math.isclose(quire, peer, abs_tol=LOGPROB_TOLERANCE, rel_tol=LOGPROB_TOLERANCE):
            yield Deviation(path, quire, peer)
    elif quire != peer:
        yield Deviation(path, quire, peer)
