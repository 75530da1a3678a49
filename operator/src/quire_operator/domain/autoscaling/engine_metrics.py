"""The engine's metrics that the autoscaler reads, and their conversion to a ``ReplicaSample``.

It stands between the adapters, which fetch series from the replica or from Prometheus, and ``observation``. Pure.
"""

import math
from collections.abc import Iterable, Mapping
from typing import NamedTuple

from quire_common.contract.engine import (
    ACCEPTED_TOKENS,
    ARRIVED_REQUESTS,
    CACHE_CONFIG,
    CACHE_HITS,
    DRAFT_TOKENS,
    FINISHED,
    FIRST_TOKEN_TIME_BUCKET,
    FIRST_TOKEN_WAIT_BUCKET,
    GENERATION_TOKENS,
    KV_USAGE,
    PROMPT_TOKENS,
    QUEUED_TOKENS,
    RUNNING,
    STEP_SECONDS,
    STEPS,
    TOKEN_GAP_BUCKET,
    UNCACHED_PROMPT_TOKENS,
    WAITING,
)
from quire_operator.domain.autoscaling.observation import Histogram, ReplicaSample

_BUCKETS = frozenset({FIRST_TOKEN_WAIT_BUCKET, FIRST_TOKEN_TIME_BUCKET, TOKEN_GAP_BUCKET})
SPECULATION_NAMES = frozenset({DRAFT_TOKENS, ACCEPTED_TOKENS})
"""The series that only engines with speculation serve; without them no draft was rejected."""
NAMES = SPECULATION_NAMES | frozenset(
    {
        RUNNING,
        WAITING,
        KV_USAGE,
        CACHE_CONFIG,
        PROMPT_TOKENS,
        GENERATION_TOKENS,
        CACHE_HITS,
        FINISHED,
        STEPS,
        QUEUED_TOKENS,
        ARRIVED_REQUESTS,
        UNCACHED_PROMPT_TOKENS,
        STEP_SECONDS,
        *_BUCKETS,
    }
)
"""All series that the autoscaler needs."""
LABELLED = frozenset({CACHE_CONFIG, *_BUCKETS})
"""The series whose labels matter; all others are summed over their labels."""


class Point(NamedTuple):
    """The current value of one series of one replica. It is a tuple because a tick has a hundred thousand of them."""

    name: str
    labels: Mapping[str, str]
    value: float


def sample_of(points: Iterable[Point], *, time: float) -> ReplicaSample | None:
    """Return the sample of a replica, or None if required series are missing."""
    sums: dict[str, float] = {}
    buckets: dict[str, dict[float, float]] = {name: {} for name in _BUCKETS}
    kv_tokens: float | None = None
    for point in points:
        if point.name == CACHE_CONFIG:
            kv_tokens = _kv_tokens(point.labels)
        elif point.name in _BUCKETS:
            bound, counts = _number(point.labels.get("le", "")), buckets[point.name]
            if bound is not None:
                counts[bound] = counts.get(bound, 0.0) + point.value
        else:
            # Sum over the labels that split one value: engine, finished_reason, part.
            sums[point.name] = sums.get(point.name, 0.0) + point.value
    if kv_tokens is None or not {RUNNING, WAITING, KV_USAGE} <= sums.keys():
        return None
    return ReplicaSample(
        time=time,
        waiting=sums[WAITING],
        running=sums[RUNNING],
        queued_prompt_tokens=sums.get(QUEUED_TOKENS, 0.0),
        kv_tokens_used=sums[KV_USAGE] * kv_tokens,
        kv_tokens_capacity=kv_tokens,
        arrived_requests=sums.get(ARRIVED_REQUESTS),
        arrived_prompt_tokens=sums.get(UNCACHED_PROMPT_TOKENS),
        prompt_tokens=sums.get(PROMPT_TOKENS, 0.0),
        cached_prompt_tokens=sums.get(CACHE_HITS, 0.0),
        generation_tokens=sums.get(GENERATION_TOKENS, 0.0),
        rejected_drafts=sums.get(DRAFT_TOKENS, 0.0) - sums.get(ACCEPTED_TOKENS, 0.0),
        finished_requests=sums.get(FINISHED, 0.0),
        steps=sums.get(STEPS),
        busy_seconds=sums.get(STEP_SECONDS),
        first_token_waits=_histogram(buckets[FIRST_TOKEN_WAIT_BUCKET]),
        first_token_times=_histogram(buckets[FIRST_TOKEN_TIME_BUCKET]),
        token_gaps=_histogram(buckets[TOKEN_GAP_BUCKET]),
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
