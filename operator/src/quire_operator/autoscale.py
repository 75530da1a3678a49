"""One tick of the autoscaler over all LLMDeployments: metrics → observe → decide → persist → scale.

Called every ``TICK_SECONDS`` by whoever owns the loop (the operator's process, ``quire up``); decides nothing itself.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from quire_operator.domain.autoscaler import Decision, Policy
from quire_operator.domain.history import ScalingRecord
from quire_operator.ports import Clock, Metrics, ReplicaAddress, ScaleTarget

TICK_SECONDS = 15.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Subject:
    """One LLMDeployment that autoscales, as its cluster sees it now."""

    key: str
    model: str
    """The served name, by which the gateways count held requests."""
    policy: Policy
    replicas: tuple[ReplicaAddress, ...]
    target: int | None
    """Replicas asked for now; None before anybody asked."""
    rolling_out: bool = False
    record: ScalingRecord | None = None
    """What was persisted; read only at this process's first tick for this key."""


class Autoscaler:
    """Holds the memory of each LLMDeployment between ticks."""

    def __init__(self, *, metrics: Metrics, target: ScaleTarget, clock: Clock) -> None:
        self._metrics, self._target, self._clock = metrics, target, clock

    async def tick(self, subjects: Sequence[Subject]) -> dict[str, Decision]:
        """Decide for every subject, persist what changed, then scale; by key. Forgets keys that are not among them."""
        raise NotImplementedError
