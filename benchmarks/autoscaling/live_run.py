"""One live run: ``quire up`` scaled by a real Prometheus, a slice of a trace against it, and one thing that goes wrong.

Everything is the packaged commands, as processes: ``quire up --prometheus-url``, ``quire bench --trace``, Prometheus
finding the replicas by the run's prometheus-targets.json, and ``quire explain --json --watch`` beside them.
"""

import csv
import json
import os
import signal
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
BIN = Path(sys.executable).parent
sys.path.insert(0, str(ROOT / "tests/cluster"))

from quire_cluster.debian import debian_programs  # noqa: E402  (the tests' way to a Prometheus without root)
from quire_cluster.ports import free_ports  # noqa: E402

SCRAPE_SECONDS = 5
_START_SECONDS = 180.0
_UNDER_WAY = 2.0
"""Sequences on average, at the speed of one alone; a replica runs two, and the slice's peak is twice its mean: enough
for the ramp, and no more than a machine digests that the replicas share."""
_TIMED = 8
_MOST_EVERY = 12
_MOST_OUTPUT = 200

Event = dict[str, Any]

DEPLOYMENT = """\
apiVersion: quire.dev/v1alpha1
kind: LLMDeployment
metadata: {{name: chat}}
spec:
  model: {{source: "file://{model}"}}
  engine: {{maxSequences: 2, maxBatchedTokens: 512, kvCache: {{size: 64Mi}}}}
  autoscaling:
    minReplicas: 1
    maxReplicas: 3
    metricsSource: Prometheus
    scaleDown: {{window: 30s, period: 10s}}
  drain: {{timeout: 30s}}
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """A slice of a trace, thinned and stretched to what one machine can take."""

    trace: Path
    start_seconds: float
    duration_seconds: float
    every: int | None
    """Only each so-manieth request; None: as many as keep ``_UNDER_WAY`` answers under way at the speed measured."""
    scale_input: float
    scale_output: float


@dataclass(slots=True)
class Record:
    """What happened, in Unix seconds."""

    case: str
    events: list[Event] = field(default_factory=list)
    """Of quire up."""
    explained: list[Event] = field(default_factory=list)
    """What quire explain --json --watch said, each with the time of hearing as ``asked``."""
    marks: list[tuple[float, str]] = field(default_factory=list)
    """What was done to it."""
    every: int = 1
    bench: Event = field(default_factory=dict)
    screen: str = ""
    """What quire explain showed at the end."""

    @property
    def start(self) -> float:
        """When the first request was sent."""
        return datetime.fromisoformat(self.bench["started_at"]).timestamp()

    def mark(self, what: str) -> float:
        now = time.time()
        self.marks.append((now, what))
        print(f"  {what}", flush=True)
        return now

    def marked(self, what: str) -> float | None:
        return next((at for at, name in self.marks if name == what), None)


class PrometheusServer:
    """A process that can be killed and started again over the same data."""

    def __init__(self, folder: Path, targets: Path) -> None:
        self._program = debian_programs("prometheus", ("prometheus", "promtool"))["prometheus"]
        self._folder = folder
        (self._port,) = free_ports(1)
        self.url = f"http://127.0.0.1:{self._port}"
        self._process: subprocess.Popen[bytes] | None = None
        (folder / "prometheus.yml").write_text(
            f"global: {{scrape_interval: {SCRAPE_SECONDS}s, scrape_timeout: 4s}}\n"
            "scrape_configs:\n"
            "  - job_name: engines\n"
            f"    file_sd_configs: [{{files: [{targets}], refresh_interval: 5s}}]\n"
        )

    def start(self) -> None:
        with (self._folder / "prometheus.log").open("ab") as log:
            self._process = subprocess.Popen(
                [
                    self._program,
                    f"--config.file={self._folder / 'prometheus.yml'}",
                    f"--storage.tsdb.path={self._folder / 'data'}",
                    f"--web.listen-address=127.0.0.1:{self._port}",
                ],
                stdout=log,
                stderr=log,
            )
        deadline = time.monotonic() + 60
        while not self._is_ready():
            if self._process.poll() is not None or time.monotonic() > deadline:
                raise SystemExit(f"Prometheus did not start: see {self._folder / 'prometheus.log'}")
            time.sleep(0.1)

    def kill(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    def _is_ready(self) -> bool:
        try:
            with urllib.request.urlopen(f"{self.url}/-/ready", timeout=2) as answer:
                return bool(answer.status == 200)
        except (urllib.error.URLError, OSError):
            return False


class Served:
    """``quire up`` as a child: its log lines as they come, its end on leaving."""

    def __init__(self, file: Path, folder: Path, *, prometheus_url: str, events: list[Event]) -> None:
        (self.port,) = free_ports(1)
        self.file, self._environ = file, {**os.environ, "XDG_STATE_HOME": str(folder / "state")}
        self.events, self._changed = events, threading.Condition()
        command = [
            str(BIN / "quire"),
            "up",
            "-f",
            str(file),
            "--port",
            str(self.port),
            "--prometheus-url",
            prometheus_url,
        ]
        self._process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=self._environ)
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    def wait_for(self, found: Callable[[list[Event]], bool], seconds: float) -> bool:
        with self._changed:
            self._changed.wait_for(lambda: found(self.events) or self._process.poll() is not None, seconds)
            return found(self.events)

    def explain(self, *arguments: str) -> subprocess.Popen[str]:
        command = [str(BIN / "quire"), "explain", "chat", "--run", str(self.file), *arguments]
        return subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=self._environ)

    def replica_pid(self, name: str) -> int:
        (state,) = Path(self._environ["XDG_STATE_HOME"]).glob("quire/*/state.json")
        processes = json.loads(state.read_text())["processes"]
        return int(next(one["pid"] for one in processes if one["name"] == name))

    def end(self) -> None:
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGINT)
        self._process.wait()
        self._reader.join()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            with self._changed:
                self.events.append(json.loads(line))
                self._changed.notify_all()
        with self._changed:
            self._changed.notify_all()


def live(
    case: str, load: Load, folder: Path, *, meddle: Callable[["Served", PrometheusServer, Record], None]
) -> Record:
    """Load and meddling side by side, then back to one replica. ``folder`` is made."""
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / "demo.yaml"
    file.write_text(DEPLOYMENT.format(model=ROOT / "examples/models/quire-demo"))
    record = Record(case=case)
    prometheus = PrometheusServer(folder, _targets(folder, file))
    prometheus.start()
    served = Served(file, folder, prometheus_url=prometheus.url, events=record.events)
    asking: subprocess.Popen[str] | None = None
    bench: subprocess.Popen[bytes] | None = None
    try:
        if not served.wait_for(lambda events: any(event["event"] == "ready" for event in events), _START_SECONDS):
            raise SystemExit(f"quire up did not become ready: {record.events[-1:]}")
        asking = served.explain("--json", "--watch")
        threading.Thread(target=_listen, args=(asking, record), daemon=True).start()
        record.every = load.every or _every(load, _tokens_per_second(served))
        print(f"  each {record.every}. request of the slice", flush=True)
        bench = _bench(served, load, record.every, folder)
        meddle(served, prometheus, record)
        bench.wait()
        record.bench = json.loads((folder / "bench.json").read_text())
        over_at = record.start + max(outcome["end_seconds"] for outcome in record.bench["requests"])
        record.marks.append((over_at, "load over"))
        if served.wait_for(is_back, 200):
            record.mark("back at 1")
        served.wait_for(lambda _: False, 3)  # for the state to be written
        record.screen = served.explain("--last", "30").communicate()[0]
    finally:
        for process in (asking, bench):
            if process is not None:
                process.terminate()
                process.wait()
        served.end()
        prometheus.kill()
    (folder / "events.json").write_text(json.dumps({"marks": record.marks, "events": record.events}, indent=1))
    (folder / "explain.txt").write_text(record.screen)
    return record


def ready_replicas(events: list[Event]) -> list[tuple[float, int]]:
    """(Unix seconds, replicas ready) at each change."""
    ready: set[str] = set()
    steps = []
    for event in events:
        if event["event"] == "phase" and event["process"] != "gateway":
            (ready.add if event["phase"] == "Ready" else ready.discard)(event["process"])
            steps.append((moment(event), len(ready)))
    return steps


def decisions(events: list[Event]) -> list[Event]:
    return [event for event in events if event["event"] == "decision"]


def is_back(events: list[Event]) -> bool:
    """One replica is asked for and one is ready, after there were more."""
    steps, said = ready_replicas(events), decisions(events)
    return bool(said) and said[-1]["to"] == 1 and any(event["to"] > 1 for event in said) and steps[-1][1] == 1


def moment(event: Event) -> float:
    return datetime.fromisoformat(event["time"]).timestamp()


def _listen(asking: subprocess.Popen[str], record: Record) -> None:
    assert asking.stdout is not None
    for line in asking.stdout:
        record.explained.append({"asked": time.time(), **json.loads(line)})


def _targets(folder: Path, file: Path) -> Path:
    """Where the run will list its replicas."""
    from quire_cli.local.state import run_folder, state_home

    return run_folder(state_home({"XDG_STATE_HOME": str(folder / "state")}), file) / "prometheus-targets.json"


def _tokens_per_second(served: Served) -> float:
    """Of one answer alone, on this machine as busy as it is now."""
    tokens = 64
    asked = {"model": "chat", "prompt": "What is a list?", "max_tokens": tokens, "ignore_eos": True}
    address = f"http://127.0.0.1:{served.port}/v1/completions"
    begun = 0.0
    for number in range(1 + _TIMED):  # the first warms up
        begun = time.monotonic() if number <= 1 else begun
        request = urllib.request.Request(address, json.dumps(asked).encode(), {"Content-Type": "application/json"})
        with urllib.request.urlopen(request, timeout=60) as answer:
            answer.read()
    return _TIMED * tokens / (time.monotonic() - begun)


def _every(load: Load, tokens_per_second: float) -> int:
    rows = _slice(load)
    tokens = sum(min(_MOST_OUTPUT, float(row[2]) * load.scale_output) for row in rows)
    under_way = tokens / load.duration_seconds / tokens_per_second
    return max(1, min(_MOST_EVERY, round(under_way / _UNDER_WAY)))


def _bench(served: Served, load: Load, every: int, folder: Path) -> subprocess.Popen[bytes]:
    trace = folder / "trace.csv"
    with trace.open("w", newline="") as thinned:
        csv.writer(thinned).writerows([("TIMESTAMP", "ContextTokens", "GeneratedTokens"), *_slice(load)[::every]])
    command = [
        str(BIN / "quire"), "bench", "--base-url", f"http://127.0.0.1:{served.port}/v1", "--trace", str(trace),
        "--scale-input", str(load.scale_input), "--scale-output", str(load.scale_output),
        "--max-input-tokens", "400", "--max-output-tokens", str(_MOST_OUTPUT), "--json", str(folder / "bench.json"),
    ]  # fmt: skip
    with (folder / "bench.log").open("wb") as log:
        return subprocess.Popen(command, stdout=log, stderr=log)


def _slice(load: Load) -> list[list[str]]:
    """Rows of the trace."""
    with load.trace.open(newline="") as source:
        _, *rows = csv.reader(source)
    first = datetime.fromisoformat(rows[0][0][:26]).timestamp()

    def within(row: list[str]) -> bool:
        at = datetime.fromisoformat(row[0][:26]).timestamp() - first
        return load.start_seconds <= at < load.start_seconds + load.duration_seconds

    return [row for row in rows if within(row)]
