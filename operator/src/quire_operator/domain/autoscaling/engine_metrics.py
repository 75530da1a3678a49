"""The engine's metrics that the autoscaler reads, and their conversion to a ``ReplicaSample``.

It stands between the adapters, which fetch series from the replica or from Prometheus, and ``observation``. Pure.
"""

import math
from collections.abc import Iterable, Mapping

from quire_common.contract import engine as m
from quire_common.metrics_page import Point
from quire_operator.domain.autoscaling.observation import Histogram, ReplicaSample

_BUCKETS = frozenset({m.FIRST_TOKEN_WAIT_BUCKET, m.FIRST_TOKEN_TIME_BUCKET, m.TOKEN_GAP_BUCKET})
SPECULATION_NAMES = frozenset({m.DRAFT_TOKENS, m.ACCEPTED_TOKENS})
"""The series that only engines with speculation serve; without them no draft was rejected."""
_GAUGES = frozenset({m.RUNNING, m.WAITING, m.KV_USAGE, m.CACHE_CONFIG, m.QUEUED_TOKENS})
_COUNTERS = frozenset(
    {
        *(m.PROMPT_TOKENS, m.UNCACHED_PROMPT_TOKENS, m.CACHE_HITS, m.GENERATION_TOKENS),
        *(m.ARRIVED_REQUESTS, m.FINISHED, m.STEPS, m.STEP_SECONDS),
    }
)
NAMES = _GAUGES | _COUNTERS | _BUCKETS | SPECULATION_NAMES
"""All series that the autoscaler needs."""
LABELLED = frozenset({m.CACHE_CONFIG, *_BUCKETS})
"""The series whose labels matter; all others are summed over their labels."""


def sample_of(points: Iterable[Point], *, time: float) -> ReplicaSample | None:
    """Return the sample of a replica, or None if required series are missing."""
    sums: dict[str, float] = {}
    buckets: dict[str, dict[float, float]] = {name: {} for name in _BUCKETS}
    kv_tokens: float | None = None
    for point in points:
        if point.name == m.CACHE_CONFIG:
            kv_tokens = _kv_tokens(point.labels)
        elif point.name in _BUCKETS:
            bound, counts = _number(point.labels.get("le", "")), buckets[point.name]
            if bound is not None:
                counts[bound] = counts.get(bound, 0.0) + point.value
        else:
            # Sum over the labels that split one value: engine, finished_reason, part.
            sums[point.name] = sums.get(point.name, 0.0) + point.value
    if kv_tokens is None or not {m.RUNNING, m.WAITING, m.KV_USAGE} <= sums.keys():
        return None
    return ReplicaSample(
        time=time,
        waiting=sums[m.WAITING],
        running=sums[m.RUNNING],
        queued_prompt_tokens=sums.get(m.QUEUED_TOKENS, 0.0),
        kv_tokens_used=sums[m.KV_USAGE] * kv_tokens,
        kv_tokens_capacity=kv_tokens,
        arrived_requests=sums.get(m.ARRIVED_REQUESTS),
        arrived_prompt_tokens=sums.get(m.UNCACHED_PROMPT_TOKENS),
        prompt_tokens=sums.get(m.PROMPT_TOKENS, 0.0),
        cached_prompt_tokens=sums.get(m.CACHE_HITS, 0.0),
        generation_tokens=sums.get(m.GENERATION_TOKENS, 0.0),
        rejected_drafts=sums.get(m.DRAFT_TOKENS, 0.0) - sums.get(m.ACCEPTED_TOKENS, 0.0),
        finished_requests=sums.get(m.FINISHED, 0.0),
        steps=sums.get(m.STEPS),
        busy_seconds=sums.get(m.STEP_SECONDS),
        first_token_waits=_histogram(buckets[m.FIRST_TOKEN_WAIT_BUCKET]),
        first_token_times=_histogram(buckets[m.FIRST_TOKEN_TIME_BUCKET]),
        token_gaps=_histogram(buckets[m.TOKEN_GAP_BUCKET]),
    )


def _kv_tokens(labels: Mapping[str, str]) -> float | None:
    blocks, size = _number(labels.get("num_gpu_blocks", "")), _number(labels.get("block_size", ""))
    return None if blocks is None or size is None else blocks * size


def _histogram(buckets: Mapping[float, float]) -> Histogram | None:
    if math.inf not in buckets:
        return None
    bounds = tuple(sorted(buckets))
    return Histogram(bounds=bounds, counts=tuple(buckets[bound] for bound in bounds))


def _number(text: str) -> float | None:
    try:
        value = float(text)
    except ValueError:
        return None
    return None if math.isnan(value) else value
