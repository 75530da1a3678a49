"""The scheduler's counters and gauges. Metrics read them; no decision depends on them."""

from collections import Counter
from dataclasses import dataclass, field


@dataclass(slots=True)
class Counters:
    """The counters since the engine started. Only the scheduler increments them."""

    steps: int = 0
    prompt_tokens: int = 0
    """The prompt tokens of admitted requests; each counts once, however often it is preempted."""
    generation_tokens: int = 0
    scheduled_tokens: int = 0
    """The computed tokens without rejected drafts: less the generated tokens, they are those of prompts."""
    discarded_tokens: int = 0
    prefix_cache_queries: int = 0
    prefix_cache_hits: int = 0
    preemptions: dict[str, int] = field(default_factory=Counter)
    """Preemptions by kind and reason, see ``core.preemption.Preemption.label``."""
    recomputed_tokens: int = 0
    """The tokens computed again after a preemption by recompute, less those found in the prefix cache."""
    swapped_out_blocks: int = 0
    swapped_in_blocks: int = 0
    num_drafts: int = 0
    """The verifications of drafts: one per sequence and step that had any."""
    draft_tokens: int = 0
    accepted_tokens: int = 0
    accepted_by_position: list[int] = field(default_factory=list)
    """The accepted drafts by their place among those of their sequence and step, from the first on."""
    undrafted_sequences: dict[str, int] = field(default_factory=Counter)
    """The decoding sequences per step that took no drafts, by reason; only with speculation."""
    adapter_loads: int = 0
    """The adapters copied into slots of the device."""

    def count_drafts(self, drafts: int, accepted: int) -> None:
        """Count the verification of a sequence's drafts."""
        self.num_drafts += 1
        self.draft_tokens += drafts
        self.accepted_tokens += accepted
        by_position = self.accepted_by_position
        by_position.extend([0] * (drafts - len(by_position)))
        for place in range(accepted):
            by_position[place] += 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Gauges:
    """The current state. Blocks are counted over all KV cache groups; ``kv_usage`` is that of the fullest."""

    num_running: int
    num_waiting: int
    queued_tokens: int
    parked_tokens: int
    """The part of these tokens that siblings will compute."""
    prefilling_tokens: int
    """The tokens that running sequences lack before they can sample one."""
    blocks_total: int
    blocks_used: int
    blocks_cached: int
    kv_usage: float
    kv_slots_wasted: int
    swap_blocks_total: int
    swap_blocks_used: int
    adapter_slots: int = 0
    loaded_adapters: list[int] = field(default_factory=list)
    """The numbers of the adapters that are in slots; those of running and of waiting sequences follow."""
    running_adapters: list[int] = field(default_factory=list)
    waiting_adapters: list[int] = field(default_factory=list)


@dataclass(slots=True)
class StepSeconds:
    """The total seconds by part of the step.

    ``run`` is the time that the host spends in the runner in addition to ``prepare``, ``swap`` and ``sample``.
    """

    schedule: float = 0.0
    prepare: float = 0.0
    swap: float = 0.0
    run: float = 0.0
    sample: float = 0.0
    output: float = 0.0
