"""What the operator's process remembers of one LLMDeployment from pass to pass, beside what the watches have shown.

Kept by ``reconcile``; all of it can be lost: whoever comes after a crash looks and writes once more.
"""

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass, field

from quire_operator.domain.conditions import MetricsProblem
from quire_operator.domain.history import ScalingRecord
from quire_operator.domain.observed import Ref
from quire_operator.domain.plan import Applied
from quire_operator.domain.repairs import RepairLog
from quire_operator.domain.rival_scalers import Contest
from quire_operator.ports import ScalingNotDone


@dataclass(slots=True)
class Persist:
    """A record of the autoscaler that waits to be written."""

    record: ScalingRecord
    done: asyncio.Future[None]

    def settle(self, error: ScalingNotDone | None) -> None:
        """Tell whoever waits for it."""
        if not self.done.done():
            self.done.set_result(None) if error is None else self.done.set_exception(error)


@dataclass(slots=True)
class Memory:
    """What this process knows of one LLMDeployment beside the store; all of it can be lost."""

    uid: str
    applied: dict[Ref, Applied] = field(default_factory=dict)
    refused: dict[Ref, tuple[str, str]] = field(default_factory=dict)
    """By child: the digest of what the API server will not take, and why."""
    decided: int | None = None
    victims: tuple[str, ...] = ()
    persist: Persist | None = None
    metrics_problem: MetricsProblem | None = None
    contest: Contest | None = None
    repairs: RepairLog = field(default_factory=RepairLog)
    conflicts: int = 0
    """In a row: a few are others who were quicker, more are worth a pause."""
    status: tuple[Mapping[str, object], Mapping[str, object]] | None = None
    """What was written last, and what the server made of it."""

    def give_up_persisting(self, why: str) -> None:
        if self.persist is not None:
            self.persist.settle(ScalingNotDone(why))
            self.persist = None
