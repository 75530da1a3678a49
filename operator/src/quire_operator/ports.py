"""What quire's decisions ask of the outside world: metrics, a clock, somebody who carries a decision out.

Implemented in ``adapters``, built by ``__main__`` and ``cli``; the loops know only these Protocols.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from quire_operator.domain.history import ScalingRecord
from quire_operator.domain.observation import ReplicaPhase, ReplicaSample


class Clock(Protocol):
    """Unix seconds."""

    def now(self) -> float: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaAddress:
    """One live replica, as the cluster knows it."""

    name: str
    """Unique among all replicas: the pod's name with its namespace, or the local process's name."""
    phase: ReplicaPhase
    metrics_url: str | None
    """Where it serves /metrics; None while it has no address."""


class Metrics(Protocol):
    """Reads what replicas say of themselves. The network never raises here: what could not be read is absent."""

    async def samples(self, replicas: Sequence[ReplicaAddress]) -> Mapping[str, ReplicaSample]:
        """The newest sample of each replica by name, for all LLMDeployments in one call."""
        ...

    async def held_requests(self) -> Mapping[str, int] | None:
        """Requests held by the gateways because no replica of their model is ready, by served model name.

        A model that no gateway names holds none. None when no gateway answered at all.
        """
        ...


class ScalingNotDone(Exception):
    """A decision could not be persisted or carried out now; the next tick tries again."""


class ScaleTarget(Protocol):
    """Carries a decision out: in the cluster through status and reconcile, locally by moving processes.

    Both raise ``ScalingNotDone`` for what a later try may mend.
    """

    async def persist(self, key: str, record: ScalingRecord) -> None:
        """Keep the record so that it outlives this process. Called before ``scale``: nothing is acted on unseen."""
        ...

    async def scale(self, key: str, *, replicas: int, victims: Sequence[str]) -> None:
        """Go to ``replicas``; where that is fewer, ``victims`` are the ones that lose least, first to go first."""
        ...
