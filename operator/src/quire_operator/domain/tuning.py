"""The constants of the law: chosen by ``benchmarks/autoscaling/tune.py`` on production traces, the same for everybody.

What a person may want otherwise is in ``spec.autoscaling``. Under ``autoscaler.decide``; pure.
"""

import math
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Tuning:
    spare: float = 0.75
    """Spare replicas, in deviations of the work times ln(1 / share of late answers allowed)."""
    flow_seconds: float = 60.0
    """Over how long arrivals are averaged."""
    drain_seconds: float = 30.0
    """In how long a queue should be worked off."""
    first_token_seconds: float = 30.0
    """Over how long late first tokens are counted."""

    def spare_replicas(self, deviation: float, *, percentile: int) -> float:
        """Those that keep ``percentile`` % of the answers in time while work deviates so much from its mean.

        The share that waits falls exponentially with the spare, as in square-root staffing (Halfin and Whitt,
        Operations Research 29, 1981), whose √ is the deviation of requests that come one by one. Here it is measured.
        """
        return self.spare * math.log(100 / (100 - percentile)) * deviation
