"""``quire explain``: the explanation of one LLMDeployment, from a local run's state or from the cluster, as a screen.

Pure: ``explain`` reads and prints. An explanation has the current decision, the history and the notices; on a terminal
it is one screen, in a pipe one line per decision.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

import msgspec
from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from quire_cli.local.state import ReplicaState, Rules, ServedState
from quire_common.quantities import format_duration
from quire_operator.api import Spec
from quire_operator.autoscaling.demand import Reason
from quire_operator.autoscaling.history import Change
from quire_operator.autoscaling.schedules import recorded_bounds
from quire_operator.autoscaling.ticks import Log, MetricsState, Stretch, Tick, time_of
from quire_operator.deployment import conditions as c
from quire_operator.deployment.status import scaling_record
from quire_operator.kube.objects import Resource

JSON = Mapping[str, object]
_BLIND = frozenset({Reason.METRICS_STALE.value, Reason.METRICS_PARTIAL.value})
_DAY_SECONDS = 86_400
_VERDICT_STYLES = {"Passed": "green", "Failed": "bold red", "Waiting": "yellow", "NoData": "dim"}

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
        canary=_canary_of(status),
        history=_joined(_decided(status), report.log),
    )


def key_inputs(inputs: Mapping[str, float]) -> str:
    """Return the most important figures of a decision as text."""
    blind = {"fresh"} if inputs.get("fresh") != inputs.get("ready") else set()
    shown = [(label, inputs[name], name) for name, label in _INPUTS if name in inputs and (name != "fresh" or blind)]
    return ", ".join(f"{label} {value:,.6g}" for label, value, name in shown if value or name in _ALWAYS | blind)


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


def _canary_of(status: JSON) -> Mapping[str, Any] | None:
    """Return ``status.rollout`` if it has something to show: a canary, or how the last one ended."""
    found = status.get("rollout")
    if not isinstance(found, Mapping):
        return None
    return found if found.get("phase") != "Stable" or found.get("message") else None


def render(explained: Explanation, *, now: datetime, last: int) -> RenderableType:
    """Return the whole screen, with the ``last`` rows of the history."""
    parts: list[RenderableType] = [_title(explained), Text(), _state(explained, now)]
    parts += [_notice(notice) for notice in explained.notices]
    if explained.canary is not None:
        parts += [Text(), _canary(explained.canary)]
    if explained.now is not None and explained.now.terms:
        parts += [Text(), _demand(explained.now, "now" if explained.ended is None else "at the last evaluation")]
    parts += [Text(), _history(explained, now, last)]
    return Group(*parts)


def line(explained: Explanation, stretch: Stretch) -> str:
    """Return one decision as a line: its time, the number of replicas, the reason."""
    tick = stretch.last
    advice = "" if tick.enforced else " (recommended, not applied)"
    return f"{_utc(stretch.since)} {explained.name} {_move(tick)}{advice} {tick.reason}: {_without_move(tick)}"


def _title(explained: Explanation) -> Text:
    name = explained.name if explained.namespace is None else f"{explained.namespace}/{explained.name}"
    served = "" if explained.served_name == explained.name else f", served as {explained.served_name}"
    return Text.assemble((name, "bold"), f"{served}  ", (explained.place, "dim"))


def _state(explained: Explanation, now: datetime) -> Table:
    table = Table.grid(padding=(0, 2))
    table.add_column(style="dim", no_wrap=True)
    table.add_column()
    if explained.ended is not None:
        table.add_row("Run", Text(explained.ended, "bold yellow"))
    table.add_row("Replicas", _replicas(explained))
    if explained.now is not None:
        table.add_row("Decision", _decision(explained.now, now))
        if explained.now.metrics is not None:
            table.add_row("Metrics", _metrics(explained.now, explained.now.metrics))
    elif explained.now_missing is not None:
        table.add_row("Decision", Text(f"unknown: {explained.now_missing}", "yellow"))
    if explained.autoscaling is not None:
        table.add_row("Up", explained.autoscaling.up_text)
        table.add_row("Down", f"{explained.autoscaling.down_text}{_counted(explained.now)}")
    return table


def _replicas(explained: Explanation) -> str:
    found = explained.replicas
    asked = "none requested yet" if found.asked is None else f"{found.asked} requested"
    return f"{asked}, {found.ready} ready, {found.starting} starting; {_bounds(explained.autoscaling)}"


def _bounds(rules: Rules | None) -> str:
    if rules is None:
        return "a fixed number (spec.autoscaling is not set)"
    advice = "" if rules.enforced else ", recommended and not applied (mode Recommend)"
    schedule = "" if rules.schedule is None else f"; {rules.schedule}"
    return f"between {rules.min_replicas} and {rules.max_replicas}{advice}{schedule}"


def _decision(tick: Tick, now: datetime) -> Text:
    age = format_duration(float(max(0, int((now - tick.time).total_seconds()))))
    advice = "" if tick.enforced else "recommended, not applied: "
    return Text.assemble((tick.reason, _style(tick)), f"  {advice}{_capital(tick.message)} ", (f"({age} ago)", "dim"))


def _metrics(tick: Tick, metrics: MetricsState) -> Text:
    ready, fresh = tick.inputs.get("ready", 0), tick.inputs.get("fresh", 0)
    source = "Prometheus" if metrics.source == "Prometheus" else "the replicas"
    age = "" if metrics.oldest_seconds is None else f", the oldest {_age(metrics.oldest_seconds)} old"
    text = Text(f"from {source}: recent for {fresh:.0f} of {ready:.0f} ready replicas{age}")
    if metrics.problem is not None:
        text.append(f"; no answer: {metrics.problem}", "red")
    return text


def _counted(tick: Tick | None) -> str:
    """Return the demand that scale-down uses: it counts starting replicas, and those without metrics, as full."""
    need = None if tick is None else tick.inputs.get("needDown")
    return "" if need is None else f"; current demand for this {need:.2f}"


def _age(seconds: float) -> str:
    return f"{seconds:.1f} s" if seconds < 10 else format_duration(float(round(seconds)))


def _notice(notice: Notice) -> Padding:
    text = Text.assemble((f"{notice.subject}: {notice.reason}", "bold yellow"), f"  {notice.message}")
    return Padding(text, (1, 0, 0, 0))


def _demand(tick: Tick, when: str) -> Table:
    table = Table(
        title=f"Demand per signal {when}, in replicas", title_justify="left", title_style="bold", expand=False
    )
    table.add_column("Signal", no_wrap=True)
    table.add_column("Replicas", justify="right", no_wrap=True)
    table.add_column("Figures")
    top = tick.terms[0].need
    for term in tick.terms:
        binding = term.need == top > 0
        name = Text(f"{'▸ ' if binding else '  '}{term.reason}", "bold" if binding else "")
        table.add_row(name, Text(f"{term.need:.2f}", "bold" if binding else ""), term.detail)
    return table


def _history(explained: Explanation, now: datetime, last: int) -> RenderableType:
    if not explained.history:
        fixed = "the number of replicas is fixed" if explained.autoscaling is None else "there are no decisions yet"
        return Text(f"No history: {fixed}.", "dim")
    shown = explained.history[-last:]
    title = "Decisions, newest first"
    if len(shown) < len(explained.history):
        title += f" (last {len(shown)} of {len(explained.history)}; use --last for more)"
    table = Table(title=title, title_justify="left", title_style="bold", expand=False, show_lines=False)
    table.add_column("When", no_wrap=True)
    table.add_column("Replicas", no_wrap=True)
    table.add_column("Why")
    for stretch in reversed(shown):
        table.add_row(_when(stretch, now), _move_text(stretch.last), _why(stretch))
    return table


def _when(stretch: Stretch, now: datetime) -> str:
    """Return the start in local time, and how long the decision was repeated."""
    local = stretch.since.astimezone()
    today = (now - stretch.since).total_seconds() < _DAY_SECONDS
    start = local.strftime("%H:%M:%S" if today else "%m-%d %H:%M")
    lasted = (stretch.last.time - stretch.since).total_seconds()
    return f"{start}\n  for {format_duration(float(round(lasted)))}" if lasted >= 1 else start


def _move(tick: Tick) -> str:
    return f"{tick.from_replicas} → {tick.to_replicas}" if tick.is_change else f"{tick.to_replicas}"


def _move_text(tick: Tick) -> Text:
    return Text(_move(tick), "bold green" if tick.is_change and tick.enforced else "")


def _why(stretch: Stretch) -> Text:
    tick = stretch.last
    advice = "" if tick.enforced else "recommended, not applied: "
    text = Text.assemble((tick.reason, _style(tick)), f"  {advice}{_capital(_without_move(tick))}")
    figures = key_inputs(tick.inputs)
    return text if not figures else text.append(f"\n{figures}", "dim")


def _without_move(tick: Tick) -> str:
    """Return the message without its first part, which the row already shows."""
    head, colon, rest = tick.message.partition(": ")
    known = (f"{tick.from_replicas} → {tick.to_replicas}", f"stays at {tick.to_replicas}")
    return rest if colon and head in known else tick.message


def _capital(sentence: str) -> str:
    return sentence[:1].upper() + sentence[1:]


def _style(tick: Tick) -> str:
    if tick.reason in _BLIND:
        return "bold yellow"
    return "bold green" if tick.is_change else "bold"


def _utc(time: datetime) -> str:
    return time.astimezone(UTC).isoformat(timespec="seconds").replace("+00:00", "Z")


def fresh_stretches(before: Sequence[Stretch], after: Sequence[Stretch]) -> list[Stretch]:
    """Return the stretches that started since; all if ``before`` is empty."""
    if not before:
        return list(after)
    return [stretch for stretch in after if stretch.since > before[-1].since]


def _canary(canary: Mapping[str, Any]) -> RenderableType:
    """Return the state of the canary and the verdict of each gate."""
    parts: list[RenderableType] = [_canary_state(canary)]
    gates = [gate for gate in canary.get("gates", ()) if isinstance(gate, Mapping)]
    if gates:
        parts += [Text(), _gates(gates)]
    return Group(*parts)


def _canary_state(canary: Mapping[str, Any]) -> Text:
    weight = f", {canary.get('weightPercent', 0)} % of the requests" if canary.get("canaryRevision") else ""
    tried = f" {canary['canaryRevision']}" if canary.get("canaryRevision") else ""
    against = f"Canary{tried} against stable {canary.get('stableRevision', '?')}{weight}"
    return Text.assemble((f"{canary.get('phase')}", "bold"), f"  {against}: {canary.get('message', '')}")


def _gates(gates: Sequence[Mapping[str, Any]]) -> Table:
    table = Table(title="Gates", title_justify="left", title_style="bold", expand=False)
    for name in ("Gate", "Stable", "Canary", "Verdict"):
        table.add_column(name, no_wrap=name != "Verdict")
    for gate in gates:
        verdict = str(gate.get("verdict"))
        why = Text.assemble((verdict, _VERDICT_STYLES.get(verdict, "")), f"  {gate.get('message', '')}")
        table.add_row(_name(gate), _figures(gate, "stable"), _figures(gate, "canary"), why)
    return table


def _name(gate: Mapping[str, Any]) -> str:
    return f"{gate.get('metric')} p{gate['percentile']}" if "percentile" in gate else str(gate.get("metric"))


def _figures(place: Mapping[str, Any], track: str) -> str:
    found = place.get(track)
    if not isinstance(found, Mapping):
        return "–"
    count = found.get("count", 0)
    if "errors" in found:
        share = f" ({100 * found['errors'] / count:.2f} %)" if count else ""
        return f"{found['errors']} of {count}{share}"
    if "percentileMicroseconds" not in found:
        return f"{count} requests"
    return f"{_ms(found['percentileMicroseconds'])} (median {_ms(found.get('p50Microseconds', 0))}, {count} requests)"


def _ms(microseconds: int) -> str:
    return f"{microseconds / 1000:.3g} ms" if microseconds < 1_000_000 else f"{microseconds / 1_000_000:.3g} s"
