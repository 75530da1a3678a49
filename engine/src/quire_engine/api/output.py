"""One answer as it grows: the tokens of one sequence become text, are counted and end. No I/O, no clock."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from quire_engine.core.batch import FinishedSequence, TokenLogprobs
from quire_engine.text.detokenizer import Detokenizer
from quire_engine.text.tokenizer import Tokenizer

FinishReason = Literal["stop", "length"]


@dataclass(frozen=True, slots=True, kw_only=True)
class StopRules:
    """The rules by which a text ends that the engine cannot see, and which parts of it are shown."""

    at_once: bool = False
    """True where no sampled token belongs to the answer, because only the prompt is wanted."""
    strings: Sequence[str] = ()
    include: bool = False
    min_tokens: int = 0
    skip_special_tokens: bool = True
    shown_ids: frozenset[int] = frozenset()
    """Special tokens that are never skipped, because a parser of the answer needs them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Delta:
    """The part of an answer that no delta has contained before."""

    index: int
    text: str
    token_ids: list[int]
    logprobs: list[TokenLogprobs]
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None
    """The stop string or stop token that ended the answer; None for the model's own end-of-sequence token."""


@dataclass(slots=True)
class Collected:
    """The deltas of one answer that is sent in one piece, joined as they arrive, so that its end costs little."""

    index: int
    texts: list[str] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None

    def add(self, delta: Delta) -> None:
        """Append a delta."""
        self.texts.append(delta.text)
        self.token_ids += delta.token_ids
        self.logprobs += delta.logprobs
        self.finish_reason, self.stop_reason = delta.finish_reason, delta.stop_reason

    def whole(self) -> Delta:
        """Return the answer as one delta."""
        return Delta(
            index=self.index,
            text="".join(self.texts),
            token_ids=self.token_ids,
            logprobs=self.logprobs,
            finish_reason=self.finish_reason,
            stop_reason=self.stop_reason,
        )


@dataclass(slots=True)
class Choice:
    """One answer. It grows with each ``append_tokens``; tokens whose text is held back are held back with it."""

    index: int
    prompt_token_ids: Sequence[int]
    detokenizer: Detokenizer
    include_stop: bool
    stop_token_ids: frozenset[int]
    end_token_id: int | None = None
    """The model's own end-of-sequence token, which is no stop reason; its further ones are, as in vLLM."""
    at_once: bool = False
    num_tokens: int = 0
    num_cached_tokens: int = 0
    finish_reason: FinishReason | None = None
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)
    """The logprobs of the prompt's tokens from the second on, if requested; complete once a token is sampled."""
    pooled: list[bytes] = field(default_factory=list)
    """The values of the parts of a prompt that is pooled, in float32."""
    _pending_ids: list[int] = field(default_factory=list)
    _pending_logprobs: list[TokenLogprobs] = field(default_factory=list)

    def append_tokens(
        self, token_ids: list[int], logprobs: list[TokenLogprobs] | None, finished: FinishedSequence | None
    ) -> Delta | None:
        """Append tokens in the order in which they were sampled. Returns None where no text can be shown yet."""
        assert self.finish_reason is None, "tokens after the end"
        shown = token_ids
        if self.at_once:
            ended = finished is not None and finished.reason != "abort"
            return self._end("", "length", None) if ended else None
        if finished is not None and finished.stop_token_id is not None and not self.include_stop:
            shown = token_ids[:-1]  # the stop token counts, but its text is not shown
        piece = self.detokenizer.feed(shown)
        count = len(token_ids) if piece.stop is None else piece.num_tokens
        self.num_tokens += count
        self._pending_ids += token_ids[:count]
        if logprobs is not None:
            self._pending_logprobs += logprobs[:count]
        if piece.stop is not None:
            return self._end(piece.text, "stop", piece.stop)
        if finished is not None and finished.reason != "abort":
            stop_id = finished.stop_token_id
            named = stop_id in self.stop_token_ids or stop_id != self.end_token_id
            stop_reason = stop_id if named else None
            return self._end(piece.text + self.detokenizer.flush(), finished.reason, stop_reason)
        return self._release(piece.text) if piece.text else None

    def _end(self, text: str, reason: FinishReason, stop_reason: str | int | None) -> Delta:
        self.finish_reason = reason
        return self._release(text, reason, stop_reason)

    def _release(
        self, text: str, finish_reason: FinishReason | None = None, stop_reason: str | int | None = None
    ) -> Delta:
        delta = Delta(
            index=self.index,
            text=text,
            token_ids=self._pending_ids,
            logprobs=self._pending_logprobs,
            finish_reason=finish_reason,
            stop_reason=stop_reason,
        )
        self._pending_ids, self._pending_logprobs = [], []
        return delta


def new_choice(
    tokenizer: Tokenizer,
    index: int,
    prompt: Sequence[int],
    rules: StopRules,
    stop_token_ids: Sequence[int],
    end_token_id: int | None,
) -> Choice:
    """Return an empty answer to ``prompt``."""
    detokenizer = Detokenizer(
        tokenizer,
        prompt=prompt,
        stops=rules.strings,
        include_stop=rules.include,
        min_tokens=rules.min_tokens,
        skip_special_tokens=rules.skip_special_tokens,
        shown_ids=rules.shown_ids,
    )
    stops = frozenset(stop_token_ids)
    return Choice(index, prompt, detokenizer, rules.include, stops, end_token_id, rules.at_once)
