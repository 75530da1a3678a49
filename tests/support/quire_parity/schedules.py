"""The ways a step loop may treat the same prompts, each with what proves that it did."""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

from quire_engine.config import SchedulerOptions


@dataclass(slots=True)
class Seen:
    """What an engine did."""

    most_running: int = 0
    partial_steps: int = 0
    """Steps after which more sequences run than were drawn for: of somebody's prompt only a part was computed."""
    prefix_cache_hits: int = 0
    preemptions: Counter[str] = field(default_factory=Counter)
    """By kind."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    scheduler: SchedulerOptions = field(default_factory=lambda: SchedulerOptions(max_num_seqs=16))
    forced: Callable[[Seen], bool]
    """Whether what it is for happened."""
    together: bool = True
    """All prompts at once, else each when the one before is done."""
    rounds: int = 1
    """How often the prompts are asked, one round after another."""
    enable_prefix_caching: bool = False
    block_size: int = 16
    cache_blocks: int = 100
    """Of every layer. The longest sequence takes 6, all together 30."""
    swap_blocks: int = 0


SCHEDULES: dict[str, Schedule] = {
    "alone": Schedule(together=False, forced=lambda seen: seen.most_running == 1),
    "a full batch": Schedule(scheduler=SchedulerOptions(max_num_seqs=5), forced=lambda seen: seen.most_running == 5),
    "in chunks": Schedule(
        scheduler=SchedulerOptions(max_num_seqs=3, max_num_batched_tokens=13),
        forced=lambda seen: seen.partial_steps > 10,
    ),
    "prefix hits": Schedule(
        scheduler=SchedulerOptions(max_num_seqs=5, max_num_batched_tokens=64),
        rounds=2,
        enable_prefix_caching=True,
        # In the second round all of each prompt but its last block, and what the prompts share in the first.
        forced=lambda seen: seen.prefix_cache_hits > 100,
    ),
    "preemption by recompute": Schedule(
        scheduler=SchedulerOptions(max_num_seqs=16, preemption_mode="recompute"),
        cache_blocks=9,
        forced=lambda seen: seen.preemptions["recompute"] > 1 and not seen.preemptions["swap"],
    ),
    "preemption by swap": Schedule(
        scheduler=SchedulerOptions(max_num_seqs=16, preemption_mode="swap"),
        cache_blocks=9,
        swap_blocks=50,
        forced=lambda seen: seen.preemptions["swap"] > 1 and not seen.preemptions["recompute"],
    ),
}
