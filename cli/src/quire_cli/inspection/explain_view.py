"""The rendering of an ``Explanation``: one screen on a terminal, one line per decision in a pipe."""

from collections.abc import Sequence
from datetime import UTC, datetime

from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from quire_cli.inspection.canary_view import render_canary
from quire_cli.inspection.explanation import Explanation, Notice, key_inputs
from quire_cli.local.state import Rules
from quire_common.quantities import format_duration
from quire_operator.domain.autoscaling.scaling_reasons import Reason
from quire_operator.domain.autoscaling.ticks import MetricsState, Stretch, Tick

_BLIND = frozenset({Reason.METRICS_STALE.value, Reason.METRICS_PARTIAL.value})
_DAY_SECONDS = 86_400


def render(explained: Explanation, *, now: datetime, last: int) -> RenderableType:
    """Return the whole screen, with the ``last`` rows of the history."""
    parts: list[RenderableType] = [_title(explained), Text(), _state(explained, now)]
    parts += [_notice(notice) for notice in explained.notices]
    if explained.canary is not None:
        parts += [Text(), render_canary(explained.canary)]
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
