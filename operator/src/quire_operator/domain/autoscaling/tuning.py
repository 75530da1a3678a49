"""The constants of the autoscaling policy: chosen by random trials on production traces (docs/autoscaling.md).

They are the same for all LLMDeployments; ``spec.autoscaling`` has what users may change. Pure.
"""

import math
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Tuning:
    spare: float = 0.55
    """Headroom in deviations of the work, times ln(1 / share of answers that may be late)."""
    rise: float = 0.9
    """The same factor for the rise of the work while a replica starts."""
    flow_seconds: float = 60.0
    """The period over which arrivals are averaged."""
    drain_seconds: float = 30.0
    """The time in which a queue should be processed."""
    first_token_seconds: float = 30.0
    """The period over which late first tokens are counted."""

    def spare_replicas(self, deviation: float, rise: float, *, percentile: int) -> float:
        """Return the headroom, in replicas, that keeps ``percentile`` % of the answers in time.

        ``deviation`` is that of the work from its mean, and ``rise`` its rise while a replica starts. The share of
        requests that wait falls exponentially with the headroom, as in square-root staffing (Halfin and Whitt,
        Operations Research 29, 1981). There the √ is the deviation of Poisson arrivals; here the deviation is measured.
        The two are added by their squares, as independent quantities.
        """
        return math.log(100 / (100 - percentile)) * math.hypot(self.spare * deviation, self.rise * rise)
