"""The constants of the law: chosen by ``benchmarks/autoscaling/tune.py`` on production traces, the same for everybody.

What a person may want otherwise is in ``spec.autoscaling``. Under ``autoscaler.decide``; pure.
"""

import math
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Tuning:
    target_load: float = 0.8
    """How full a replica may be by plan: what is left absorbs the next seconds."""
    spare: float = 0.7
    """Spare replicas for a burst, as a share of √(busy replicas) · ln(1 / share of late answers allowed)."""
    burst_seconds: float = 30.0
    """Over how long a burst is measured."""
    drain_seconds: float = 30.0
    """In how long a queue should be worked off."""
    flow_seconds: float = 60.0
    """Over how long arrivals are averaged."""
    growth_share: float = 0.5
    """Of the mean answer: what a running sequence is still to generate."""
    first_token_seconds: float = 30.0
    """Over how long late first tokens are counted."""
    first_token_hold: float = 0.99
    """What late first tokens count as on the way down, as a share of the replicas there are."""

    def with_spare(self, busy: float, *, percentile: int) -> float:
        """Replicas that keep ``percentile`` % of the answers in time while ``busy`` of them are busy on average.

        Bursts vary as the square root of what arrives, and the share that waits falls exponentially with the spare
        (square-root staffing, Halfin and Whitt, Operations Research 29, 1981).
        """
        return busy + self.spare * math.log(100 / (100 - percentile)) * math.sqrt(busy)
