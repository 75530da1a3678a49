"""The current state of the scheduler, read from its parts for metrics. It changes nothing and decides nothing."""

from quire_engine.core.adapter_slots import AdapterSlots
from quire_engine.core.forks import ParkedChildren
from quire_engine.core.kv_manager import KVManager
from quire_engine.core.policy import Policy
from quire_engine.core.sequence import Sequence
from quire_engine.core.stats import Gauges


def read_gauges(
    *,
    running: list[Sequence],
    waiting: Policy,
    parked: ParkedChildren,
    kv: KVManager,
    adapters: AdapterSlots,
) -> Gauges:
    """Return the gauges of a scheduler's queues, blocks and adapters."""
    pools = kv.pools
    return Gauges(
        num_running=len(running),
        num_waiting=len(waiting) + len(parked),
        queued_tokens=waiting.num_tokens + parked.num_tokens,
        parked_tokens=parked.num_tokens,
        prefilling_tokens=sum([sequence.num_to_prefill for sequence in running]),
        blocks_total=sum(pool.num_blocks for pool in pools),
        blocks_used=sum(pool.num_used for pool in pools),
        blocks_cached=sum(pool.num_cached for pool in pools),
        kv_usage=max(pool.num_used / pool.num_blocks for pool in pools),
        kv_slots_wasted=kv.wasted_slots(running),
        swap_blocks_total=sum(kv.swap_space.num_blocks),
        swap_blocks_used=kv.swap_space.num_used,
        adapter_slots=adapters.count,
        loaded_adapters=adapters.loaded,
        running_adapters=adapters.running,
        waiting_adapters=_waiting_adapters(waiting) if adapters.count and len(waiting) else [],
    )


def _waiting_adapters(waiting: Policy) -> list[int]:
    found = dict.fromkeys(sequence.request.adapter for sequence in waiting.sequences())
    return [adapter for adapter in found if adapter is not None]
