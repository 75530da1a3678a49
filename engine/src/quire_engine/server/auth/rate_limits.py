"""What a key may use, and what of it is left: token buckets, as plain functions of values and a given time.

``allowance`` keeps one pair of buckets per tenant and asks here. A bucket holds a minute's worth at most, so that a
minute's worth may come at once, and fills evenly.
"""

import math
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Bucket:
    """What was left at that time. Below zero it is in debt: what is drawn is known only afterwards."""

    level: float
    time: float


def refilled(bucket: Bucket, per_minute: int, now: float) -> Bucket:
    """At most a minute's worth, also where the limit has become smaller since."""
    gained = max(0.0, now - bucket.time) * per_minute / 60.0
    return Bucket(min(float(per_minute), bucket.level + gained), now)


def missing(bucket: Bucket, cost: float, per_minute: int) -> float:
    """How much must still flow in before this may be taken; 0 where it may now.

    What costs more than the bucket can ever hold needs a full one, and leaves a debt behind.
    """
    return max(0.0, min(cost, float(per_minute)) - bucket.level)


def taken(bucket: Bucket, cost: float) -> Bucket:
    return Bucket(bucket.level - cost, bucket.time)


def seconds_to_gain(amount: float, per_minute: int) -> float:
    return amount * 60.0 / per_minute


def written_duration(seconds: float) -> str:
    """As OpenAI writes times until a reset: 250ms, 7.5s, 1m30s."""
    if seconds < 1.0:
        return f"{math.ceil(seconds * 1000)}ms"
    minutes, rest = divmod(math.ceil(seconds * 10) / 10, 60)
    shown = f"{rest:.1f}".removesuffix(".0") + "s"
    return f"{minutes:.0f}m{shown}" if minutes else shown
