"""The comparison of two replicas' answers to one greedy request: pure functions on bodies and answers.

Under ``comparisons``, which sends the requests. Tokens with temperature 0 depend only on the prompt and the model, so a
canary with a changed kernel, precision or checkpoint answers differently where it computes something else. The order of
additions changes with the batch, so that two tokens with nearly equal probabilities may change places on any replica.
Answers that part at such a near tie do not count.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, TypeGuard

import msgspec

COMPARED_TOKENS = 64
"""The most tokens of an answer that are compared."""
_TOP_LOGPROBS = 5
_NEAR_TIE = 0.25
"""Two tokens whose logprobs differ by at most so much are nearly equally likely (56 % to 44 %)."""
_MOST_DRIFT = 0.1
"""Logprobs of equal tokens that differ by more than this in the mean make an answer different."""
_CHAT, _COMPLETIONS = "/v1/chat/completions", "/v1/completions"
_UNSUITED = ("echo", "prompt_logprobs", "quire_resume")
"""Fields of requests that are not repeated: several answers, prompts in the answer, or state of one replica."""
_DROPPED = ("stream", "stream_options", "max_completion_tokens", "n")


class Result(StrEnum):
    SAME = "same"
    DIFFERENT = "different"
    NEAR_TIE = "near_tie"
    FAILED = "failed"
    """There are no two answers to compare."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Token:
    """One token of an answer with its logprob, and those of the most likely tokens at its place."""

    text: str
    logprob: float
    top: Mapping[str, float]

    def gap_to(self, other: str) -> float:
        """Return by how much less likely another token was at this place; infinite if it was not among the likely."""
        return abs(self.logprob - self.top[other]) if other in self.top else float("inf")


def greedy_body(body: bytes | bytearray, *, path: str) -> bytes | None:
    """Return the body of the request that is repeated for a comparison; None for one that cannot be compared.

    Only requests that set temperature 0 and ask for one answer are compared. The answer is short, whole, and has
    logprobs.
    """
    if path not in (_CHAT, _COMPLETIONS):
        return None
    try:
        fields = msgspec.json.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None
    if not isinstance(fields, dict) or not _is_suited(fields):
        return None
    most = min((n for n in map(fields.get, _LENGTHS) if _is_count(n)), default=COMPARED_TOKENS)
    repeated = {name: value for name, value in fields.items() if name not in _DROPPED}
    repeated["max_tokens"] = min(most, COMPARED_TOKENS)
    if path == _CHAT:
        repeated |= {"logprobs": True, "top_logprobs": _TOP_LOGPROBS}
    else:
        repeated["logprobs"] = _TOP_LOGPROBS
    return msgspec.json.encode(repeated)


_LENGTHS = ("max_tokens", "max_completion_tokens")


def _is_suited(fields: Mapping[str, Any]) -> bool:
    temperature = fields.get("temperature")
    if isinstance(temperature, bool) or temperature != 0 or fields.get("n") not in (None, 1):
        return False
    prompt = fields.get("prompt")
    is_one = not isinstance(prompt, list) or all(isinstance(each, int) for each in prompt)
    # A length of 0 samples nothing.
    return is_one and not any(fields.get(name) for name in _UNSUITED) and 0 not in map(fields.get, _LENGTHS)


def _is_count(value: object) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0


class _Likely(msgspec.Struct):
    token: str
    logprob: float


class _ChatToken(_Likely):
    top_logprobs: list[_Likely] = []


class _Logprobs(msgspec.Struct):
    content: list[_ChatToken] | None = None
    tokens: list[str] | None = None
    token_logprobs: list[float] | None = None
    top_logprobs: list[dict[str, float]] | None = None


class _Choice(msgspec.Struct):
    logprobs: _Logprobs | None = None


class _Answer(msgspec.Struct):
    choices: list[_Choice]


def read_answer(body: bytes) -> tuple[Token, ...] | None:
    """Return the tokens of an answer; None if it has none with logprobs."""
    try:
        answer = msgspec.json.decode(body, type=_Answer)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None
    found = answer.choices[0].logprobs if len(answer.choices) == 1 else None
    if found is None:
        return None
    if found.content is not None:
        return tuple(
            Token(text=each.token, logprob=each.logprob, top={top.token: top.logprob for top in each.top_logprobs})
            for each in found.content
        )
    if found.tokens is None or found.token_logprobs is None:
        return None
    tops: Sequence[Mapping[str, float]] = found.top_logprobs or [{}] * len(found.tokens)
    columns = zip(found.tokens, found.token_logprobs, tops, strict=False)
    return tuple(Token(text=text, logprob=logprob, top=top) for text, logprob, top in columns)


def compare(stable: Sequence[Token], canary: Sequence[Token]) -> Result:
    """Return whether two answers are the same: their tokens up to a near tie, and the logprobs of these tokens."""
    pairs = list(zip(stable, canary, strict=False))
    equal = next((place for place, (one, other) in enumerate(pairs) if one.text != other.text), len(pairs))
    drift = sum(abs(one.logprob - other.logprob) for one, other in pairs[:equal])
    if drift > _MOST_DRIFT * equal:
        return Result.DIFFERENT
    if equal < len(pairs):
        one, other = pairs[equal]
        # The noise of a batch moves logprobs little, so that both replicas see the tie.
        is_tie = max(one.gap_to(other.text), other.gap_to(one.text)) <= _NEAR_TIE
        return Result.NEAR_TIE if is_tie else Result.DIFFERENT
    if len(stable) == len(canary):
        return Result.SAME
    # One of them ended. The end has no logprob: it was nearly as likely if the other went on without certainty.
    longer = max(stable, canary, key=len)
    return Result.NEAR_TIE if longer[equal].logprob <= _UNCERTAIN else Result.DIFFERENT


_UNCERTAIN = -0.5
"""The logprob of a token that had a probability of at most 61 %."""
