"""The interfaces that the core requires."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from quire_common.contract.adapters_file import AdapterFailure
from quire_engine.core.batch import Batch, RunnerOutput, TokenMasks
from quire_engine.core.kv_layout import KVCacheLayout
from quire_engine.core.options import ModelTraits
from quire_engine.core.stall_bound import StepCosts


class PendingOutput(Protocol):
    """A step in flight. On a CPU it is done when ``sample`` returns; on a GPU ``wait`` is where the host blocks."""

    def wait(self) -> RunnerOutput: ...


class ForwardPass(Protocol):
    """A step whose logits are computed, or will be on a GPU, while the host may prepare masks."""

    @property
    def token_ids(self) -> list[int]:
        """The inputs of the step, including the drafts of a runner's own draft model."""

    def sample(self, masks: TokenMasks | None = None) -> PendingOutput:
        """Sample the next tokens, or issue this. Call it once, before the next ``Runner.execute``."""


class Runner(Protocol):
    """The runner of the model over batches. It is called from one thread, in step order.

    ``execute`` may be called for step n + 1 before ``wait`` on step n: ``Batch.feedback_tokens`` names the inputs that
    the runner fills with the tokens that it sampled in step n. If step n has drafts, it is waited for first.

    Steps take effect in order, and within a step every layer stores the keys and values of all rows before any row
    attends: the scheduler reuses a block as soon as the step that fills it (or reads it last) was issued.
    """

    def execute(self, batch: Batch) -> ForwardPass: ...

    def close(self) -> None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterEvent:
    """An adapter that was read from disk and checked, or that cannot be served."""

    adapter: int
    rank: int = 0
    num_bytes: int = 0
    reason: AdapterFailure | None = None
    """The reason why it cannot be served; None if it can."""
    message: str = ""


class AdapterStore(Protocol):
    """The adapters in host memory, by number. Disks are read in another thread; no method waits for one."""

    on_read: Callable[[], None] | None
    """It is called in the other thread after each event."""

    def add(self, adapter: int, folder: str) -> None:
        """Read and check an adapter; an event reports the result."""

    def remove(self, adapter: int) -> None:
        """Forget an adapter that no request holds."""

    def knows(self, adapter: int) -> bool:
        """Return whether the adapter was added and not removed."""

    def has(self, adapter: int) -> bool:
        """Return whether it is in host memory."""

    def fetch(self, adapter: int) -> bool:
        """Read it if it is not in host memory; return False if there is no room for it now."""

    def hold(self, adapter: int) -> None:
        """Keep an adapter that is in host memory, or is being read, until as many calls of ``release``."""

    def release(self, adapter: int) -> None: ...

    def take_events(self) -> list[AdapterEvent]:
        """Return the events since the last call."""

    def close(self) -> None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedModel:
    """A model that is ready to run, and the facts measured while it was loaded."""

    runner: Runner
    layout: KVCacheLayout
    traits: ModelTraits
    vocab_size: int
    model_bytes: int
    kv_cache_bytes: int
    dtype: str
    weights: str
    phase_seconds: dict[str, float]
    asynchronous: bool = False
    """True if ``execute`` returns before the step is done, so that scheduling one step ahead saves time."""
    step_costs: StepCosts | None = None
    """Measured in the warm-up, like the next one: the initial values of ``core.preemption_cost`` and
    ``core.stall_bound``. None means not measured."""
    swap_bytes_per_second: float | None = None
    """The rate of copies of blocks between the cache and the swap space, in either direction."""
    seconds_per_draft: float | None = None
    """The first estimate of the time that a draft model takes for a draft; None if there is no draft model."""
    block_bytes: tuple[int, ...] = ()
    """The bytes of one block, keys and values of all its layers, per KV cache group; empty if unknown."""
    adapters: AdapterStore | None = None
    """The adapters in host memory; None where the model has no slots for adapters."""
