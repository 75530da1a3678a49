"""The cost to restore a preempted sequence in either way, from rates measured on this machine.

The functions are pure except for the averages. Recompute costs the tokens to compute again, times the measured seconds
per prompt token. Swap costs the bytes to copy out and later in, times the measured seconds per byte. Both omit the
leading blocks that another running sequence also holds, if possible, because these are still in the cache when the
victim returns. The victim's own blocks may survive there as well, which would make either way cheaper; but it was
preempted because blocks are scarce, so none is assumed. The overlap of copies and model is not subtracted either.

``Scheduler.commit`` updates the rates with each step; ``LoadedModel`` has those of the warm-up.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from quire_engine.core.batch import Batch, BlockCopies, RunnerOutput

PROMPT_SHARE = 0.75
"""A step measures the cost of prompts if at least this share of its tokens are prompt tokens."""
FEWEST_TOKENS = 64
"""And if it has this many tokens: smaller steps measure their fixed cost."""
WEIGHT_OF_NEWEST = 0.2
"""The weight in an exponential average: about ten samples back count."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PreemptionWork:
    """The work that a preemption of a victim causes."""

    tokens: int
    """The tokens to compute again, without a swap."""
    blocks_out: tuple[int, ...]
    """The blocks to copy out in a swap, per KV cache group."""
    blocks_in: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Costs:
    recompute_seconds: float
    swap_seconds: float


class MeasuredRates:
    """Averages of seconds per token and per byte, each None until something was measured."""

    def __init__(
        self,
        *,
        seconds_per_token: float | None = None,
        swap_bytes_per_second: float | None = None,
        block_bytes: Sequence[int] = (),
    ) -> None:
        self.seconds_per_token = seconds_per_token
        self.seconds_per_byte = 1.0 / swap_bytes_per_second if swap_bytes_per_second else None
        self._block_bytes = tuple(block_bytes)

    def observe_step(self, batch: Batch, output: RunnerOutput, *, prompt_tokens: int) -> None:
        """Update the rates from a step, of whose tokens ``prompt_tokens`` are of prompts."""
        num_tokens, seconds = batch.num_tokens, output.run_seconds
        if seconds > 0.0 and prompt_tokens >= max(FEWEST_TOKENS, PROMPT_SHARE * num_tokens):
            self.seconds_per_token = _averaged(self.seconds_per_token, seconds / num_tokens)
        num_bytes = self._bytes_of(batch.swap_out) + self._bytes_of(batch.swap_in)
        if output.swap_seconds > 0.0 and num_bytes > 0:
            self.seconds_per_byte = _averaged(self.seconds_per_byte, output.swap_seconds / num_bytes)

    def costs(self, loss: PreemptionWork) -> Costs | None:
        """Return the costs, or None if a rate or the size of blocks is unknown."""
        num_bytes = self._bytes(loss.blocks_out) + self._bytes(loss.blocks_in)
        if self.seconds_per_token is None or self.seconds_per_byte is None or not num_bytes:
            return None
        return Costs(
            recompute_seconds=loss.tokens * self.seconds_per_token,
            swap_seconds=num_bytes * self.seconds_per_byte,
        )

    def _bytes_of(self, copies: tuple[BlockCopies, ...]) -> int:
        return self._bytes([len(of_group.sources) for of_group in copies]) if copies else 0

    def _bytes(self, num_blocks: Sequence[int]) -> int:
        if not self._block_bytes:
            return 0
        return sum(count * size for count, size in zip(num_blocks, self._block_bytes, strict=True))


def _averaged(before: float | None, sample: float) -> float:
    return sample if before is None else before + WEIGHT_OF_NEWEST * (sample - before)
