"""The reasoning of one sequence before its answer: where it stands, and the tokens that it allows next. Pure."""

from collections.abc import Iterable
from dataclasses import dataclass

from quire_engine.core.batch import mask_bytes
from quire_engine.core.sampling_params import ReasoningPhase


@dataclass(slots=True)
class ReasoningTracker:
    """A sequence is before its reasoning, within it, or past it."""

    phase: ReasoningPhase
    is_open: bool = False
    is_over: bool = False
    count: int = 0
    """The tokens of reasoning, without the tags."""

    def __post_init__(self) -> None:
        """Begin within the reasoning where the prompt does."""
        self.is_open = self.phase.opened
        self.is_over = not self.phase.opened and not self.phase.optional

    @property
    def must_end(self) -> bool:
        """True where the end tag is the only token allowed."""
        budget = self.phase.budget
        return self.is_open and not self.is_over and budget is not None and self.count >= budget

    def follow(self, token_id: int) -> bool:
        """Take in a sampled token, and return whether it belongs to the reasoning or is one of its tags."""
        if self.is_over:
            return False
        if not self.is_open:
            # Only the first token of an answer may begin reasoning.
            self.is_open = token_id == self.phase.start_token_id
            self.is_over = not self.is_open
            return self.is_open
        if token_id == self.phase.end_token_id:
            self.is_over = True
        else:
            self.count += 1
        return True

    def mask(self, answer: bytes | None, vocab_size: int, eos_token_ids: tuple[int, ...]) -> bytes | None:
        """Return the mask of the next token; None allows every token.

        ``answer`` is what a grammar allows first in the answer; None without a grammar.
        """
        if self.is_over:
            return answer
        if self.must_end:
            return with_bits(bytes(mask_bytes(vocab_size)), (self.phase.end_token_id,))
        if answer is None:
            return None
        if self.is_open:
            # The answer that the grammar demands is still to come.
            return without_bits(b"\xff" * mask_bytes(vocab_size), eos_token_ids)
        return with_bits(answer, (self.phase.start_token_id,))


def with_bits(mask: bytes, token_ids: Iterable[int]) -> bytes:
    """Return a mask that allows these tokens as well."""
    changed = bytearray(mask)
    for token_id in token_ids:
        changed[token_id // 8] |= 1 << token_id % 8
    return bytes(changed)


def without_bits(mask: bytes, token_ids: Iterable[int]) -> bytes:
    """Return a mask without these tokens."""
    changed = bytearray(mask)
    for token_id in token_ids:
        if token_id // 8 < len(changed):
            changed[token_id // 8] &= ~(1 << token_id % 8) & 0xFF
    return bytes(changed)
