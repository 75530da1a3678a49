"""One answer in the making: one sequence's tokens turned into text, counted and ended. No I/O, no clock.

``server.generation.generation`` feeds it what the engine drew; ``server.openai`` writes what it returns.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from quire_engine.core.batch import FinishedSequence, TokenLogprobs
from quire_engine.text.detokenizer import Detokenizer
from quire_engine.text.tokenizer import Tokenizer

FinishReason = Literal["stop", "length"]


@dataclass(frozen=True, slots=True, kw_only=True)
class StopRules:
    """What ends a text beyond what the engine sees, and what of it is shown."""

    at_once: bool = False
    """Nothing of what is drawn belongs to the answer: only the prompt is wanted."""
    strings: Sequence[str] = ()
    include: bool = False
    min_tokens: int = 0
    skip_special_tokens: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Delta:
    """What an answer gained. Nothing of it was in a delta before."""

    index: int
    text: str
    token_ids: list[int]
    logprobs: list[TokenLogprobs]
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None
    """The stop string or the stop token that ended it; None for the model's own end."""


@dataclass(slots=True)
class Choice:
    """Mutable: it grows with each ``take``. Tokens whose text is held back wait with it."""

    index: int
    prompt_token_ids: Sequence[int]
    detokenizer: Detokenizer
    include_stop: bool
    stop_token_ids: frozenset[int]
    at_once: bool = False
    num_tokens: int = 0
    num_cached_tokens: int = 0
    finish_reason: FinishReason | None = None
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)
    """Of the prompt's tokens from the second on, where they were asked for: whole once anything was drawn."""
    cumulative_logprob: float = 0.0
    """Of its tokens, where their logprobs were asked for."""
    _pending_ids: list[int] = field(default_factory=list)
    _pending_logprobs: list[TokenLogprobs] = field(default_factory=list)

    @property
    def mean_logprob(self) -> float:
        return self.cumulative_logprob / max(1, self.num_tokens)

    def take(
        self, token_ids: list[int], logprobs: list[TokenLogprobs] | None, finished: FinishedSequence | None
    ) -> Delta | None:
        """Add tokens in the order drawn. None where there is nothing to show yet."""
        assert self.finish_reason is None, "tokens after the end"
        shown = token_ids
        if finished is not None:
            self.num_cached_tokens = finished.num_cached_tokens
        if self.at_once:
            ended = finished is not None and finished.reason != "abort"
            return self._end("", "length", None) if ended else None
        if finished is not None and finished.stop_token_id is not None and not self.include_stop:
            shown = token_ids[:-1]  # the stop token counts, but its text does not show
        piece = self.detokenizer.feed(shown)
        taken = len(token_ids) if piece.stop is None else piece.num_tokens
        self.num_tokens += taken
        self._pending_ids += token_ids[:taken]
        if logprobs is not None:
            self._pending_logprobs += logprobs[:taken]
            self.cumulative_logprob += sum([one.logprobs[0] for one in logprobs[:taken]])
        if piece.stop is not None:
            return self._end(piece.text, "stop", piece.stop)
        if finished is not None and finished.reason != "abort":
            stop_id = finished.stop_token_id
            told = stop_id if stop_id in self.stop_token_ids else None
            return self._end(piece.text + self.detokenizer.flush(), finished.reason, told)
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
    tokenizer: Tokenizer, index: int, prompt: Sequence[int], rules: StopRules, stop_token_ids: Sequence[int]
) -> Choice:
    detokenizer = Detokenizer(
        tokenizer,
        prompt=prompt,
        stops=rules.strings,
        include_stop=rules.include,
        min_tokens=rules.min_tokens,
        skip_special_tokens=rules.skip_special_tokens,
    )
    return Choice(index, prompt, detokenizer, rules.include, frozenset(stop_token_ids), rules.at_once)
