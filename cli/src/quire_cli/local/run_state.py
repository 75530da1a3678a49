"""A local run as its state file has it: written by ``local.snapshot``, read by ``quire explain`` and ``quire top``.

Pure. Read leniently: what another version wrote counts as absent, and what it added is passed over.
"""

from collections.abc import Mapping

import msgspec

from quire_cli.local.scaling_rules import Rules
from quire_operator.domain.autoscaling.ticks import Log


class ProcessRecord(msgspec.Struct, frozen=True, kw_only=True):
    """Tells a process from a later one with the same number, within one boot."""

    name: str
    pid: int
    started: str


class ReplicaState(msgspec.Struct, frozen=True, kw_only=True):
    name: str
    phase: str
    url: str | None = None
    restarts: int = 0
    reason: str | None = None
    """Why it ended last."""


class ServedState(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    """One LLMDeployment of the run."""

    served_name: str
    replicas: int
    """Asked for."""
    ready_replicas: int
    autoscaling: Rules | None = None
    """None: the number is fixed."""
    replica_states: tuple[ReplicaState, ...] = ()
    decisions: Log = ()


class RunState(msgspec.Struct, frozen=True, kw_only=True):
    pid: int
    started: float
    """Unix seconds."""
    time: float
    """When it was written."""
    ended: float | None = None
    """When everything it had started had ended; None while it lives, and where it was killed."""
    file: str
    address: str
    owner: ProcessRecord | None = None
    """The quire command itself."""
    deployments: dict[str, ServedState] = {}
    processes: tuple[ProcessRecord, ...] = ()
    boot: str = ""


def read_run(state: Mapping[str, object]) -> RunState | None:
    """None where it is empty, or of another version."""
    try:
        return msgspec.convert(state, RunState)
    except msgspec.ValidationError:
        return None
