"""What the scheduler counts, and how it stands now. Read by metrics; nothing is decided by it."""

from collections import Counter
from dataclasses import dataclass, field


@dataclass(slots=True)
class Counters:
    """Since the engine started. Added to by the scheduler alone."""

    steps: int = 0
    prompt_tokens: int = 0
    """Of requests that were admitted; once each, however often they are preempted."""
    generation_tokens: int = 0
    scheduled_tokens: int = 0
    discarded_tokens: int = 0
    prefix_cache_queries: int = 0
    prefix_cache_hits: int = 0
    preemptions: dict[str, int] = field(default_factory=Counter)
    """By kind and reason, as ``core.preemption.Preemption.label`` names them."""
    recomputed_tokens: int = 0
    """Computed again after a preemption by recompute, less what was still found in the prefix cache."""
    swapped_out_blocks: int = 0
    swapped_in_blocks: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Gauges:
    """Blocks are counted over all KV cache groups; ``kv_usage`` is that of the fullest."""

    num_running: int
    num_waiting: int
    queued_tokens: int
    parked_tokens: int
    """Those of them that siblings will compute."""
    prefilling_tokens: int
    """What running sequences lack before they can draw a token."""
    blocks_total: int
    blocks_used: int
    blocks_cached: int
    kv_usage: float
    kv_slots_wasted: int
    swap_blocks_total: int
    swap_blocks_used: int


@dataclass(slots=True)
class StepSeconds:
    """Total seconds by part of the step. ``run`` is what the host spends with the runner in addition to ``prepare``,
    ``swap`` and ``sample``."""

    schedule: float = 0.0
    prepare: float = 0.0
    swap: float = 0.0
    run: float = 0.0
    sample: float = 0.0
    output: float = 0.0
