"""A model with a canary: which version a request goes to, what each has served, and whether their answers agree.

Pure. Answers are compared for one greedy request, which both versions get.
"""

import hashlib
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, TypeGuard

import msgspec

from quire_common.contract.gateway import (
    CANARY,
    EQUAL_LOAD,
    INTER_TOKEN_LATENCY,
    STABLE,
    TIME_TO_FIRST_TOKEN,
    CanaryRoute,
    bin_of,
)

WARM_UP_SECONDS = 60.0
PATIENCE_SECONDS = 30.0
"""A request counts as unanswered after such a time without a first byte, and again each time while it still waits."""
_BUCKETS = 10_000
_MOST_DEBT = 50.0
"""The number of requests by which sessions may distort the shares before the others stop making up for it."""
_LEAST_EVENTS = 4
"""A stream with fewer events says little about the time between two tokens."""
COMPARED_TOKENS = 64
"""The most tokens of an answer that are compared."""
_LENGTHS = ("max_tokens", "max_completion_tokens")
_UNCERTAIN = -0.5
"""The logprob of a token that had a probability of at most 61 %."""
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


@dataclass(slots=True)
class TrackFigures:
    """The requests that one track has served since the canary's revision began."""

    requests: int = 0
    errors: int = 0
    latencies: dict[str, Counter[int]] = field(default_factory=lambda: defaultdict(Counter))
    """Histograms by metric."""
    late: int = 0
    """The requests that ended, or got their first byte, after they had counted as unanswered."""
    waiting: dict[int, float] = field(default_factory=dict)
    """The times at which requests without a first byte were sent, by an id of the attempt."""

    def page(self, now: float) -> dict[str, object]:
        """Return the figures as they are sent."""
        unanswered = self.late + sum(int((now - sent) // PATIENCE_SECONDS) for sent in self.waiting.values())
        counts = {"requests": self.requests, "errors": self.errors, "unanswered": unanswered}
        return {**counts, "latencies": self.latencies}


class Tracks:
    """The two tracks of one model."""

    def __init__(self, route: CanaryRoute) -> None:
        self.route = route
        self.figures = {STABLE: TrackFigures(), CANARY: TrackFigures()}
        self.answers: Counter[Result] = Counter()
        """The results of the comparisons of answers."""
        self._uncompared = 0.0
        """The comparisons that are due."""
        self._debt = 0.0
        """The requests that the canary should have got and has not."""

    def update(self, route: CanaryRoute) -> None:
        """Apply a new weight. Another revision starts with new figures."""
        if route.revision != self.route.revision:
            self.figures = {STABLE: TrackFigures(), CANARY: TrackFigures()}
            self.answers = Counter()
        if route != self.route:
            self._debt = 0.0
        self.route = route

    def choose(self, session: str | None) -> str:
        """Return the track of a new request."""
        share = self.route.weight_percent / 100
        is_canary = self._debt + share >= 0.5 if session is None else _bucket(session) < share * _BUCKETS
        # A weight of 0 must not make up for anything.
        debt = self._debt + share - is_canary if share else 0.0
        self._debt = max(-_MOST_DEBT, min(_MOST_DEBT, debt))
        return CANARY if is_canary and share else STABLE

    def is_compared(self) -> bool:
        """Return whether a greedy request is part of the sample of comparisons."""
        self._uncompared += self.route.compared_percent / 100
        if self._uncompared < 1.0:
            return False
        self._uncompared -= 1.0
        return True

    def is_equal_load(self, *, stable: int, canary: int) -> bool:
        """Return whether a replica of the canary gets as many requests as a stable one, with so many ready replicas."""
        weight = self.route.weight_percent
        expected = (100 - weight) * canary
        return weight > 0 and abs(weight * stable - expected) <= EQUAL_LOAD * expected

    def page(self, now: float) -> dict[str, object]:
        """Return the figures of both tracks as they are sent."""
        tracks = {name: figures.page(now) for name, figures in self.figures.items()}
        different = self.answers[Result.DIFFERENT]
        answers = {
            "compared": self.answers[Result.SAME] + different,
            "different": different,
            "nearTies": self.answers[Result.NEAR_TIE],
            "failed": self.answers[Result.FAILED],
        }
        return {"revision": self.route.revision, "tracks": tracks, "answers": answers}


class TrackedAttempt:
    """The measurement of one attempt at one replica: an answer or an error, and its latencies."""

    def __init__(self, figures: TrackFigures, *, is_warm: bool, is_compared: bool, now: float) -> None:
        self._figures, self._is_compared, self._sent = figures, is_compared, now
        self._first: float | None = None
        if is_warm:
            figures.waiting[id(self)] = now
        self._last = 0.0
        self._events = 0
        self._is_done = False

    def note_bytes(self, now: float, *, events: int) -> None:
        """Record that a part of the answer arrived, with so many whole events of a stream."""
        if self._first is None:
            self._first = now
            self.stop_waiting(now)
            if self._is_compared:
                self._figures.latencies[TIME_TO_FIRST_TOKEN][bin_of(now - self._sent)] += 1
        self._events += events
        self._last = now

    def stop_waiting(self, now: float) -> None:
        """Record that the attempt has a first byte, or that it ended without one."""
        sent = self._figures.waiting.pop(id(self), now)
        self._figures.late += now - sent >= PATIENCE_SECONDS

    def end(self, *, is_error: bool) -> None:
        """Count the request once: as answered, or as an error of this track."""
        if self._is_done:
            return
        self._is_done = True
        self._figures.requests += 1
        self._figures.errors += is_error
        if not is_error and self._is_compared and self._first is not None and self._events >= _LEAST_EVENTS:
            gap = (self._last - self._first) / (self._events - 1)
            self._figures.latencies[INTER_TOKEN_LATENCY][bin_of(gap)] += 1


def _bucket(session: str) -> int:
    digest = hashlib.blake2b(session.encode(), digest_size=8).digest()
    return int.from_bytes(digest) % _BUCKETS
