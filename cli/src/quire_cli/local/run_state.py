"""The state file of a local run, which ``local.snapshot`` writes and ``quire explain`` and ``quire top`` read.

Pure. Read leniently: what another version wrote counts as absent, and what it added is passed over.
"""

from collections.abc import Mapping

import msgspec

from quire_cli.local.scaling_rules import Rules
from quire_operator.domain.autoscaling.ticks import Log


class ProcessRecord(msgspec.Struct, frozen=True, kw_only=True):
    """The identity of a process within one boot, which a later process with the same number does not share."""

    name: str
    pid: int
    started: str


class ReplicaState(msgspec.Struct, frozen=True, kw_only=True):
    name: str
    phase: str
    url: str | None = None
    restarts: int = 0
    reason: str | None = None
    """The reason why it last ended."""


class ServedState(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    """One LLMDeployment of the run."""

    served_name: str
    replicas: int
    """The requested number of replicas."""
    ready_replicas: int
    autoscaling: Rules | None = None
    """None: the number of replicas is fixed."""
    replica_states: tuple[ReplicaState, ...] = ()
    decisions: Log = ()


class RunState(msgspec.Struct, frozen=True, kw_only=True):
    pid: int
    started: float
    """In Unix seconds."""
    time: float
    """The time at which it was written."""
    ended: float | None = None
    """The time at which all processes had ended; None while the run lives, or if it was killed."""
    file: str
    address: str
    owner: ProcessRecord | None = None
    """The process of the quire command."""
    deployments: dict[str, ServedState] = {}
    processes: tuple[ProcessRecord, ...] = ()
    boot: str = ""


def read_run(state: Mapping[str, object]) -> RunState | None:
    """Return the state, or None if it is empty or of another version."""
    try:
        return msgspec.convert(state, RunState)
    except msgspec.ValidationError:
        return None
