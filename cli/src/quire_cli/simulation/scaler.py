"""The autoscaler in a simulation: the protocol, and quire's own policy behind it.

``simulate`` evaluates it every ``period_seconds``. Other autoscalers (HPA, KPA, KEDA …) implement the same protocol.
"""

from dataclasses import dataclass, replace
from typing import Protocol

from quire_operator.domain.autoscaling.autoscaler import decide
from quire_operator.domain.autoscaling.decision_context import Policy
from quire_operator.domain.autoscaling.history import History
from quire_operator.domain.autoscaling.observation import Observation

TICK_SECONDS = 15.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Scaling:
    """The decision of an autoscaler."""

    replicas: int
    victims: tuple[str, ...] = ()
    """Which go first, where it is fewer than there are; the simulator picks the rest as a ReplicaSet does."""
    reason: str = ""
    message: str = ""


class Scaler(Protocol):
    """Mutable: it may remember. One instance serves one run."""

    @property
    def period_seconds(self) -> float:
        """The time between two evaluations."""

    @property
    def scrape_seconds(self) -> float:
        """The time between scrapes; an evaluation uses the last one. 0 scrapes at each evaluation."""

    def decide(self, observation: Observation, now: float) -> Scaling: ...


class QuireScaler:
    """``domain.autoscaler.decide``, unchanged, with its memory between ticks.

    ``epoch`` is the Unix time of the simulation's start, which decides the schedules that are in force.
    """

    def __init__(
        self,
        policy: Policy,
        *,
        period_seconds: float = TICK_SECONDS,
        scrape_seconds: float = 0.0,
        epoch: float = 0.0,
    ) -> None:
        self.policy = policy
        self.period_seconds = period_seconds
        self.scrape_seconds = scrape_seconds
        self.history = History()
        self._epoch = epoch

    def decide(self, observation: Observation, now: float) -> Scaling:
        decision = decide(self.policy, _later(observation, self._epoch), self.history, now + self._epoch)
        self.history = decision.history
        return Scaling(
            replicas=decision.desired if decision.enforced else decision.current,
            victims=decision.victims if decision.enforced else (),
            reason=decision.reason.value,
            message=decision.message,
        )


def _later(observation: Observation, seconds: float) -> Observation:
    """Return the observation with its samples taken so much later."""
    if not seconds:
        return observation
    replicas = (
        replica
        if replica.sample is None
        else replace(replica, sample=replace(replica.sample, time=replica.sample.time + seconds))
        for replica in observation.replicas
    )
    return replace(observation, replicas=tuple(replicas))
