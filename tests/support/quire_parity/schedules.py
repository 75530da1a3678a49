"""Schedules of the same prompts, each with a proof that its purpose occurred."""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

from quire_engine.core.options import SchedulerOptions


@dataclass(slots=True)
class Seen:
    """The facts about an engine's run."""

    most_running: int = 0
    partial_steps: int = 0
    """Steps after which more sequences run than sampled a token: only a part of some prompt was computed."""
    prefix_cache_hits: int = 0
    preemptions: Counter[str] = field(default_factory=Counter)
    """Preemptions by kind."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    scheduler: SchedulerOptions = field(
        default_factory=lambda: SchedulerOptions(max_num_seqs=16, enable_prefix_caching=False)
    )
    forced: Callable[[Seen], bool]
    """Returns True if the schedule's purpose occurred."""
    together: bool = True
    """All prompts at once, otherwise each after the one before."""
    rounds: int = 1
    """The number of rounds in which the prompts are requested."""
    block_size: int = 16
    cache_blocks: int = 100
    """The blocks of every layer. The longest sequence needs 6, all together 30."""
    swap_blocks: int = 0


SCHEDULES: dict[str, Schedule] = {
    "alone": Schedule(together=False, forced=lambda seen: seen.most_running == 1),
    "a full batch": Schedule(
        scheduler=SchedulerOptions(max_num_seqs=5, enable_prefix_caching=False),
        forced=lambda seen: seen.most_running == 5,
    ),
    "in chunks": Schedule(
        scheduler=SchedulerOptions(max_num_seqs=3, max_num_batched_tokens=13, enable_prefix_caching=False),
        forced=lambda seen: seen.partial_steps > 10,
    ),
    "prefix hits": Schedule(
        scheduler=SchedulerOptions(max_num_seqs=5, max_num_batched_tokens=64),
        rounds=2,
        # In the second round all of each prompt except its last block, and the shared prefixes in the first.
        forced=lambda seen: seen.prefix_cache_hits > 100,
    ),
    "preemption by recompute": Schedule(
        scheduler=SchedulerOptions(max_num_seqs=16, preemption_mode="recompute", enable_prefix_caching=False),
        cache_blocks=9,
        forced=lambda seen: seen.preemptions["recompute"] > 1 and not seen.preemptions["swap"],
    ),
    "preemption by swap": Schedule(
        scheduler=SchedulerOptions(max_num_seqs=16, preemption_mode="swap", enable_prefix_caching=False),
        cache_blocks=9,
        swap_blocks=50,
        forced=lambda seen: seen.preemptions["swap"] > 1 and not seen.preemptions["recompute"],
    ),
}
