"""``quire explain``: the explanation of one LLMDeployment, from a local run's state or from the cluster. Pure.

This module selects the current decision, the history and the notices; other modules read and print.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any

import msgspec

from quire_cli.inspection.canary_view import canary_of
from quire_cli.local.state import ReplicaState, Rules, ServedState
from quire_operator.domain.autoscaling.history import Change
from quire_operator.domain.autoscaling.scaling_reasons import Reason
from quire_operator.domain.autoscaling.schedules import recorded_bounds
from quire_operator.domain.autoscaling.ticks import Log, Stretch, Tick, time_of
from quire_operator.domain.cluster_state.observed import Resource
from quire_operator.domain.resource import Spec
from quire_operator.domain.status import conditions as c
from quire_operator.domain.status.scaling_status import scaling_record

JSON = Mapping[str, object]

_INPUTS = (
    ("needUp", "need"),
    ("waiting", "waiting"),
    ("running", "running"),
    ("queuedPromptTokens", "queued tokens"),
    ("kvTokensUsed", "KV tokens"),
    ("heldRequests", "held"),
    ("inFlightRequests", "in flight"),
    ("ready", "ready"),
    ("starting", "starting"),
    ("fresh", "fresh"),
)
_ALWAYS = frozenset({"waiting", "running", "ready"})


class Notice(msgspec.Struct, frozen=True, kw_only=True):
    """An unusual fact that affects the number of replicas."""

    subject: str
    reason: str
    message: str


class Replicas(msgspec.Struct, frozen=True, kw_only=True):
    """The requested and the existing replicas."""

    asked: int | None
    """None before a number was requested."""
    ready: int
    starting: int


class Explanation(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    """The explanation of one LLMDeployment."""

    name: str
    namespace: str | None
    """None for a run on this machine."""
    served_name: str
    place: str
    ended: str | None = None
    """The end of a local run that is over."""
    replicas: Replicas
    autoscaling: Rules | None
    """None: the number of replicas is fixed."""
    now: Tick | None
    """The autoscaler's last evaluation."""
    now_missing: str | None = None
    """The reason why the last evaluation is unknown."""
    notices: tuple[Notice, ...] = ()
    canary: Mapping[str, Any] | None = None
    """``status.rollout``, if there is a canary or one has ended; None without strategy Canary."""
    history: Log = ()
    """Oldest first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OperatorReport:
    """The operator's recent decisions, as it reported them."""

    log: Log
    problem: str | None
    """The reason why the operator did not report them."""


def of_run(name: str, served: ServedState, *, place: str, ended: str | None) -> Explanation:
    """Return the explanation from a local run's state."""
    phases = [replica.phase for replica in served.replica_states]
    now = served.decisions[-1].last if served.decisions else None
    missing = None
    if now is None and served.autoscaling is not None:
        missing = "the autoscaler has not evaluated it yet; it does so every 15 s"
    return Explanation(
        name=name,
        namespace=None,
        served_name=served.served_name,
        place=place,
        ended=ended,
        replicas=Replicas(
            asked=served.replicas,
            ready=served.ready_replicas,
            starting=sum(phase in ("Pending", "Loading") for phase in phases),
        ),
        autoscaling=served.autoscaling,
        now=now,
        now_missing=missing,
        notices=() if ended else _run_notices(now, served.replica_states),
        history=served.decisions,
    )


def of_resource(resource: Resource, report: OperatorReport, *, place: str, now: float) -> Explanation:
    """Return the explanation from an LLMDeployment and its operator's decisions, with the bounds of ``now``."""
    status = resource.status
    spec = Spec.parse(resource.body)
    valid = spec if isinstance(spec, Spec) else None
    autoscaling = None if valid is None else valid.autoscaling
    asked, ready = _count(status, "desiredReplicas"), _count(status, "readyReplicas") or 0
    last = report.log[-1].last if report.log else None
    return Explanation(
        name=resource.key.name,
        namespace=resource.key.namespace,
        served_name=resource.key.name if valid is None else valid.model.served_name,
        place=place,
        replicas=Replicas(asked=asked, ready=ready, starting=max(0, (asked or 0) - ready)),
        autoscaling=None
        if autoscaling is None
        else Rules.of(autoscaling, recorded_bounds(autoscaling, scaling_record(status), now)),
        now=last,
        now_missing=report.problem if last is None and autoscaling is not None else None,
        notices=_condition_notices(status),
        canary=canary_of(status),
        history=_joined(_decided(status), report.log),
    )


def key_inputs(inputs: Mapping[str, float]) -> str:
    """Return the most important figures of a decision as text."""
    blind = {"fresh"} if inputs.get("fresh") != inputs.get("ready") else set()
    shown = [(label, inputs[name], name) for name, label in _INPUTS if name in inputs and (name != "fresh" or blind)]
    return ", ".join(f"{label} {value:,.6g}" for label, value, name in shown if value or name in _ALWAYS | blind)


def near_names(name: str, known: Sequence[str]) -> str:
    """Return a hint with similar names."""
    near = get_close_matches(name, known, n=3)
    if near:
        return f"did you mean {' or '.join(near)}?"
    shown = ", ".join(sorted(known)[:10])
    more = f" and {len(known) - 10} more" if len(known) > 10 else ""
    return f"there is {shown}{more}" if known else "there is no LLMDeployment"


def _run_notices(now: Tick | None, replicas: Sequence[ReplicaState]) -> tuple[Notice, ...]:
    notices = []
    if now is not None and now.reason in (Reason.METRICS_STALE, Reason.METRICS_PARTIAL):
        problem = None if now.metrics is None else now.metrics.problem
        notices.append(Notice(subject="Metrics", reason=now.reason, message=problem or now.message))
    notices += [
        Notice(
            subject=replica.name,
            reason=replica.phase,
            message=f"process ended: {replica.reason or 'unknown reason'}; restarted {_times(replica.restarts)}",
        )
        for replica in replicas
        if replica.phase == "Failed" or (replica.restarts and replica.phase in ("Pending", "Loading"))
    ]
    return tuple(notices)


def _times(count: int) -> str:
    return "once" if count == 1 else f"{count} times"


def _condition_notices(status: JSON) -> tuple[Notice, ...]:
    listed = status.get("conditions")
    found = [item for item in listed if isinstance(item, Mapping)] if isinstance(listed, list) else []
    notices = (
        Notice(subject=str(item.get("type")), reason=str(item.get("reason", "")), message=str(item.get("message", "")))
        for item in found
        if _is_notable(str(item.get("type")), str(item.get("status")), str(item.get("reason", "")))
    )
    # Ready and Degraded often change for one reason, which is shown once.
    return tuple({(notice.reason, notice.message): notice for notice in notices}.values())


def _is_notable(kind: str, status: str, reason: str) -> bool:
    match kind:
        case c.AUTOSCALING:
            return reason not in ("Enforcing", "NotConfigured")
        case c.READY:
            return status == "False"
        case c.PROGRESSING:
            return reason == "RollingOut" or (status == "False" and reason != "Complete")
        case c.DEGRADED:
            return status == "True"
    return False


def _decided(status: JSON) -> Log:
    """Return the changes in the status as evaluations."""
    record = scaling_record(status)
    return () if record is None else tuple(map(_stretch, record.changes))


def _stretch(change: Change) -> Stretch:
    time = time_of(change.time)
    tick = Tick(
        time=time,
        from_replicas=change.from_replicas,
        to_replicas=change.to_replicas,
        reason=change.reason,
        message=change.message,
        enforced=True,
        inputs=change.inputs,
    )
    return Stretch(since=time, ticks=1, last=tick)


def _joined(kept: Log, heard: Log) -> Log:
    """Join the status, which goes back further, and the operator's report, which is more detailed."""
    if not heard:
        return kept
    return (*(stretch for stretch in kept if stretch.since < heard[0].since), *heard)


def _count(status: JSON, name: str) -> int | None:
    value = status.get(name)
    return value if isinstance(value, int) else None
