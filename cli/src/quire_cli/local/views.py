"""The views of ``quire up``: a live table on a terminal, JSON lines elsewhere. A run calls a ``View``."""

import errno
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Protocol, TextIO

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn
from rich.table import Table
from rich.text import Text

from quire_cli.local.process import Phase
from quire_cli.local.state import ReplicaState, RunState, ServedState
from quire_common.quantities import format_bytes, format_duration
from quire_operator.autoscaling.observation import ReplicaSample

RATE_SECONDS = 4.0
"""The period over which tokens per second are averaged."""

_PHASE_STYLE: Mapping[str, str] = {
    Phase.PENDING: "dim",
    Phase.LOADING: "yellow",
    Phase.READY: "green",
    Phase.DRAINING: "cyan",
    Phase.FAILED: "bold red",
    Phase.ENDED: "dim",
}
_PROGRESS_SECONDS = 5.0


class View(Protocol):
    """The output of a run."""

    @property
    def wants_metrics(self) -> bool:
        """True if ``show`` is to be called every second."""
        ...

    def event(self, kind: str, message: str, fields: Mapping[str, object] | None = None) -> None:
        """Report an event; ``message`` is for people, ``fields`` for programs."""
        ...

    def download(self, model: str, done: int, total: int) -> None: ...

    def show(self, state: RunState, metrics: "ReplicaMetrics") -> None: ...

    def close(self) -> None: ...


class JsonLines:
    """A view with one JSON object per line: ``time``, ``event``, ``message`` and the event's own fields."""

    wants_metrics = False

    def __init__(self, out: TextIO, *, on_gone: Callable[[], None] = lambda: None) -> None:
        self._out, self._on_gone = out, on_gone
        self._reported: dict[str, float] = {}

    def event(self, kind: str, message: str, fields: Mapping[str, object] | None = None) -> None:
        time = datetime.now(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
        line = {"time": time, "event": kind, "message": message, **(fields or {})}
        try:
            print(json.dumps(line, ensure_ascii=False), file=self._out, flush=True)
        except BrokenPipeError:  # the reader is gone, as after `quire up … | head`
            self._on_gone()
        except OSError as error:  # on a full disk the run continues without output
            if error.errno != errno.ENOSPC:
                raise

    def download(self, model: str, done: int, total: int) -> None:
        now = datetime.now(UTC).timestamp()
        if done < total and now - self._reported.get(model, 0.0) < _PROGRESS_SECONDS:
            return
        self._reported[model] = now
        message = f"{model}: {format_bytes(done)} of {format_bytes(total)}"
        self.event("download", message, {"model": model, "doneBytes": done, "totalBytes": total})

    def show(self, state: RunState, metrics: "ReplicaMetrics") -> None:
        """Do nothing: changes were reported as events."""

    def close(self) -> None: ...


class LiveTable:
    """A view with a table that is redrawn in place; events scroll above it."""

    wants_metrics = True

    def __init__(self, console: Console) -> None:
        self._console = console
        self._downloads: Progress | None = None
        self._tasks: dict[str, int] = {}
        self._live: Live | None = None

    def event(self, kind: str, message: str, fields: Mapping[str, object] | None = None) -> None:
        if kind == "decision" and not (fields or {}).get("changed"):
            return  # the table shows it
        self._end_downloads()
        clock = datetime.now().strftime("%H:%M:%S")
        self._console.print(Text.assemble((f"{clock}  ", "dim"), message), soft_wrap=True)
        if kind == "ready":
            self._console.print(Text(f"\n  {(fields or {}).get('curl')}\n"), soft_wrap=True)

    def download(self, model: str, done: int, total: int) -> None:
        if self._downloads is None:
            columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(binary_units=True))
            self._downloads = Progress(*columns, TransferSpeedColumn(), TimeRemainingColumn(), console=self._console)
            self._downloads.start()
        if model not in self._tasks:
            self._tasks[model] = self._downloads.add_task(f"downloading {model}", total=total)
        self._downloads.update(self._tasks[model], completed=done, total=total)  # type: ignore[arg-type]

    def show(self, state: RunState, metrics: "ReplicaMetrics") -> None:
        self._end_downloads()
        if self._live is None:
            self._live = Live(console=self._console, auto_refresh=False, transient=True)
            self._live.start()
        self._live.update(render(state, metrics), refresh=True)

    def close(self) -> None:
        self._end_downloads()
        if self._live is not None:
            self._live.stop()
            self._live = None

    def _end_downloads(self) -> None:
        if self._downloads is not None:
            self._downloads.stop()
            self._downloads = None


@dataclass(slots=True)
class ReplicaMetrics:
    """The replicas' metrics, with the counters of the last seconds, from which rates are computed."""

    samples: Mapping[str, ReplicaSample] = field(default_factory=dict)
    tokens_per_second: Mapping[str, float] = field(default_factory=dict)
    _seen: dict[str, list[tuple[float, float]]] = field(default_factory=dict)

    def update(self, samples: Mapping[str, ReplicaSample]) -> None:
        """Take new samples by replica. The rate of a counter that fell (a restart) starts again."""
        self._seen = {name: seen for name, seen in self._seen.items() if name in samples}
        rates: dict[str, float] = {}
        for name, sample in samples.items():
            seen = self._seen.setdefault(name, [])
            if seen and sample.generation_tokens < seen[-1][1]:
                seen.clear()
            seen.append((sample.time, sample.generation_tokens))
            while len(seen) > 2 and sample.time - seen[1][0] >= RATE_SECONDS:
                seen.pop(0)
            elapsed = sample.time - seen[0][0]
            if elapsed > 0:
                rates[name] = (sample.generation_tokens - seen[0][1]) / elapsed
        self.samples, self.tokens_per_second = samples, rates


def render(state: RunState, metrics: ReplicaMetrics) -> RenderableType:
    """Return the table, and below it the last decision of each autoscaler."""
    table = Table(expand=False, title_justify="left", title=_title(state))
    table.add_column("Replica", no_wrap=True)
    table.add_column("Phase", no_wrap=True)
    for name in ("Running", "Queue", "KV use", "Tokens/s", "Restarts"):
        table.add_column(name, justify="right", no_wrap=True)
    for served in state.deployments.values():
        for replica in served.replica_states:
            table.add_row(*_row(replica, metrics))
        table.add_section()
    if state.phase == Phase.DRAINING:
        return table
    return Group(table, *(line for name, served in state.deployments.items() for line in _remarks(name, served, state)))


def _title(state: RunState) -> Text:
    up = format_duration(float(int(state.time - state.started)))
    keys = "Ctrl-C ends at once" if state.phase == Phase.DRAINING else "Ctrl-C drains"
    return Text.assemble((state.address, "bold"), f"  {state.phase.lower()}  up {up}  {keys}", style="not italic")


def _row(replica: ReplicaState, metrics: ReplicaMetrics) -> tuple[RenderableType, ...]:
    sample, rate = metrics.samples.get(replica.name), metrics.tokens_per_second.get(replica.name)
    capacity = 0 if sample is None else sample.kv_tokens_capacity
    return (
        replica.name,
        Text(replica.phase, style=_PHASE_STYLE[replica.phase]),
        "–" if sample is None else f"{sample.running:.0f}",
        "–" if sample is None else f"{sample.waiting:.0f}",
        "–" if sample is None or capacity <= 0 else f"{100 * sample.kv_tokens_used / capacity:.0f} %",
        "–" if rate is None else f"{rate:,.0f}",
        str(replica.restarts) if replica.restarts else "",
    )


def _remarks(name: str, served: ServedState, state: RunState) -> list[Text]:
    bounds, rules = "", served.autoscaling
    if rules is not None:
        why = "" if rules.schedule is None else f"; {rules.schedule}"
        bounds = f" (between {rules.min_replicas} and {rules.max_replicas}{why})"
    replicas = "replica" if served.replicas == 1 else "replicas"
    lines = [Text.assemble((name, "bold"), f": {served.ready_replicas} of {served.replicas} {replicas} ready{bounds}")]
    if served.decisions:
        tick = served.decisions[-1].last
        age = format_duration(float(max(0, int(state.time - tick.time.timestamp()))))
        advice = "" if tick.enforced else "recommended, not applied: "
        lines.append(Text.assemble(("  autoscaler ", "dim"), f"{advice}{tick.message}", (f"  {age} ago", "dim")))
    failed = [one for one in served.replica_states if one.phase == Phase.FAILED and one.reason]
    return lines + [Text(f"  {one.name} ended: {(one.reason or '')[:200]}", style="red") for one in failed]
