"""Rate limits as token buckets: plain functions of values and of a given time.

The engine and the gateway keep one pair of buckets per tenant. A bucket holds the amount of one minute, so a whole
minute's amount may be used at once, and it fills evenly.
"""

import math
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Bucket:
    """The level of a token bucket at a time. Below zero it is in debt: sampled tokens are charged afterwards."""

    level: float
    time: float


def refilled(bucket: Bucket, per_minute: float, now: float) -> Bucket:
    """Return the bucket as it is at ``now``: at most one minute's amount, even after the limit has been lowered."""
    gained = max(0.0, now - bucket.time) * per_minute / 60.0
    return Bucket(min(float(per_minute), bucket.level + gained), now)


def missing(bucket: Bucket, cost: float, per_minute: float) -> float:
    """Return the amount that must flow in before ``cost`` can be charged; 0 where it can be charged now.

    A cost above the bucket's capacity needs a full bucket, and leaves a debt.
    """
    return max(0.0, min(cost, float(per_minute)) - bucket.level)


def charged(bucket: Bucket, cost: float) -> Bucket:
    """Return the bucket after ``cost`` is charged to it."""
    return Bucket(bucket.level - cost, bucket.time)


def seconds_to_gain(amount: float, per_minute: float) -> float:
    """Return the seconds in which ``amount`` flows in."""
    return amount * 60.0 / per_minute


def ratelimit_headers(what: str, limit: int, level: float) -> dict[str, str]:
    """Return OpenAI's ``x-ratelimit-*`` headers of ``requests`` or ``tokens``, with ``level`` left of ``limit``."""
    return {
        f"x-ratelimit-limit-{what}": str(limit),
        f"x-ratelimit-remaining-{what}": str(max(0, math.floor(level))),
        f"x-ratelimit-reset-{what}": written_duration(seconds_to_gain(limit - level, limit)),
    }


def written_duration(seconds: float) -> str:
    """Return a duration as OpenAI writes the time until a reset: 250ms, 7.5s, 1m30s."""
    if seconds < 1.0:
        return f"{math.ceil(seconds * 1000)}ms"
    minutes, rest = divmod(math.ceil(seconds * 10) / 10, 60)
    shown = f"{rest:.1f}".removesuffix(".0") + "s"
    return f"{minutes:.0f}m{shown}" if minutes else shown
