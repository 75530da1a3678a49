"""What the core asks of the outside world."""

from dataclasses import dataclass
from typing import Protocol

from quire_engine.core.batch import Batch, RunnerOutput, TokenMasks
from quire_engine.core.kv_layout import KVCacheLayout
from quire_engine.core.stall_bound import StepCosts


class PendingOutput(Protocol):
    """A step under way. On a CPU it is done when ``sample`` returns; on a GPU ``wait`` is where the host stops."""

    def wait(self) -> RunnerOutput: ...


class ForwardPass(Protocol):
    """A step whose logits are computed, or will be on a GPU, while the host may work on masks."""

    def sample(self, masks: TokenMasks | None = None) -> PendingOutput:
        """Sample the next tokens, or issue this. It must be called once, before the next ``Runner.execute``."""


class Runner(Protocol):
    """Runs the model over a batch. Called from one thread, in step order.

    ``execute`` may be called for step n + 1 before ``wait`` on step n: ``Batch.feedback_tokens`` names the inputs which
    the runner fills from its own draw of step n.

    Steps take effect in order, and within a step every layer stores the keys and values of all rows before any row
    attends: the scheduler hands a block on as soon as the step that fills it (or that last reads it) was issued.
    """

    def execute(self, batch: Batch) -> ForwardPass: ...

    def close(self) -> None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedModel:
    """A model ready to run, and what was learnt while loading it."""

    runner: Runner
    layout: KVCacheLayout
    max_model_len: int
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    model_bytes: int
    kv_cache_bytes: int
    dtype: str
    weights: str
    phase_seconds: dict[str, float]
    asynchronous: bool = False
    """Whether ``execute`` returns before the step is done, so that scheduling one step ahead gains time."""
    prefill_tokens_per_second: float | None = None
    """Measured at warm-up, as are the next two: where ``core.preemption_cost`` and ``core.stall_bound`` begin. None is
    not measured."""
    step_costs: StepCosts | None = None
    swap_bytes_per_second: float | None = None
    """Copying blocks between the cache and the swap space, either way."""
    block_bytes: tuple[int, ...] = ()
    """Bytes of one block, keys and values of all its layers, one entry per KV cache group; empty is not known."""
