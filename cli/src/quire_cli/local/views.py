"""The views of ``quire up``: a live table on a terminal, JSON lines elsewhere. A run calls a ``View``."""

import errno
import json
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from typing import Protocol, TextIO

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn
from rich.table import Table
from rich.text import Text

from quire_cli.local.snapshot import DeploymentView, ReplicaView, Snapshot
from quire_cli.local.supervision import Phase
from quire_common.quantities import format_bytes, format_duration

_PHASE_STYLE = {
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
    def wants_snapshots(self) -> bool: ...

    def event(self, kind: str, message: str, fields: Mapping[str, object] | None = None) -> None:
        """Report an event; ``message`` is for people, ``fields`` for programs."""
        ...

    def download(self, model: str, done: int, total: int) -> None: ...

    def show(self, snapshot: Snapshot) -> None: ...

    def close(self) -> None: ...


class JsonLines:
    """A view with one JSON object per line: ``time``, ``event``, ``message`` and the event's own fields."""

    wants_snapshots = False

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

    def show(self, snapshot: Snapshot) -> None:
        """Do nothing: changes were reported as events."""

    def close(self) -> None: ...


class LiveTable:
    """A view with a table that is redrawn in place; events scroll above it."""

    wants_snapshots = True

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

    def show(self, snapshot: Snapshot) -> None:
        self._end_downloads()
        if self._live is None:
            self._live = Live(console=self._console, auto_refresh=False, transient=True)
            self._live.start()
        self._live.update(render(snapshot), refresh=True)

    def close(self) -> None:
        self._end_downloads()
        if self._live is not None:
            self._live.stop()
            self._live = None

    def _end_downloads(self) -> None:
        if self._downloads is not None:
            self._downloads.stop()
            self._downloads = None


def render(snapshot: Snapshot) -> RenderableType:
    """Return the table, and below it the last decision of each autoscaler."""
    table = Table(expand=False, title_justify="left", title=_title(snapshot))
    table.add_column("Replica", no_wrap=True)
    table.add_column("Phase", no_wrap=True)
    for name in ("Running", "Queue", "KV use", "Tokens/s", "Restarts"):
        table.add_column(name, justify="right", no_wrap=True)
    for view in snapshot.deployments:
        for replica in view.replicas:
            table.add_row(*_row(replica))
        table.add_section()
    if snapshot.draining:
        return table
    return Group(table, *(line for view in snapshot.deployments for line in _remarks(view, snapshot.time)))


def _title(snapshot: Snapshot) -> Text:
    up = format_duration(float(int(snapshot.time - snapshot.started)))
    gateway = snapshot.gateway
    state = "draining" if snapshot.draining else "down" if gateway is None else gateway.phase.value.lower()
    keys = "Ctrl-C ends at once" if snapshot.draining else "Ctrl-C drains"
    return Text.assemble((snapshot.address, "bold"), f"  {state}  up {up}  {keys}", style="not italic")


def _row(replica: ReplicaView) -> tuple[RenderableType, ...]:
    status, sample = replica.status, replica.sample
    rate = replica.tokens_per_second
    return (
        status.name,
        Text(status.phase.value, style=_PHASE_STYLE[status.phase]),
        "–" if sample is None else f"{sample.running:.0f}",
        "–" if sample is None else f"{sample.waiting:.0f}",
        "–" if replica.kv_percent is None else f"{replica.kv_percent:.0f} %",
        "–" if rate is None else f"{rate:,.0f}",
        str(status.restarts) if status.restarts else "",
    )


def _remarks(view: DeploymentView, now: float) -> list[Text]:
    bounds = ""
    if view.bounds is not None:
        why = "" if view.bounds.why is None else f"; {view.bounds.why}"
        bounds = f" (between {view.bounds.min_replicas} and {view.bounds.max_replicas}{why})"
    replicas = "replica" if view.target == 1 else "replicas"
    lines = [Text.assemble((view.spec.name, "bold"), f": {view.ready} of {view.target} {replicas} ready{bounds}")]
    if view.decision is not None:
        age = format_duration(float(max(0, int(now - view.decision.time.timestamp()))))
        advice = "" if view.decision.enforced else "recommended, not applied: "
        lines.append(
            Text.assemble(("  autoscaler ", "dim"), f"{advice}{view.decision.message}", (f"  {age} ago", "dim"))
        )
    for replica in view.replicas:
        if replica.status.phase is Phase.FAILED and replica.status.reason:
            reason = f"  {replica.status.name} ended: {replica.status.reason[:200]}"
            lines.append(Text(reason, style="red"))
    return lines
