"""The constants of the law: chosen by ``benchmarks/autoscaling/tune.py`` on production traces, the same for everybody.

What a person may want otherwise is in ``spec.autoscaling``. Under ``autoscaler.decide``; pure.
"""

import math
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Tuning:
    spare: float = 0.55
    """Spare replicas, in deviations of the work times ln(1 / share of late answers allowed)."""
    rise: float = 0.9
    """The same for how far work rises while a replica starts."""
    flow_seconds: float = 60.0
    """Over how long arrivals are averaged."""
    drain_seconds: float = 30.0
    """In how long a queue should be worked off."""
    first_token_seconds: float = 30.0
    """Over how long late first tokens are counted."""

    def spare_replicas(self, deviation: float, rise: float, *, percentile: int) -> float:
        """Those that keep ``percentile`` % of the answers in time while work deviates so much from its mean, and rises
        so far while a replica starts.

        The share that waits falls exponentially with the spare, as in square-root staffing (Halfin and Whitt,
        Operations Research 29, 1981), whose √ is the deviation of requests that come one by one. Here it is measured.
        The two are added as what is independent is, by their squares.
        """
        return math.log(100 / (100 - percentile)) * math.hypot(self.spare * deviation, self.rise * rise)
