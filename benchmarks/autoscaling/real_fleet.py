"""Engines, gateway and autoscaler as real local processes under load, watched: one half of ``validate.py``."""

import json
import signal
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from quire_operator.adapters.metrics.scrape import points
from quire_operator.domain.autoscaling.engine_metrics import NAMES, sample_of
from quire_operator.domain.autoscaling.observation import ReplicaSample

BIN = Path(sys.executable).parent
HERE = Path(__file__).parent
PORT = 18790
_STARTING = ("Pending", "Loading")
Event = dict[str, Any]


def moment(event: Event) -> float:
    """Unix seconds."""
    return datetime.fromisoformat(event["time"]).timestamp()


@dataclass(frozen=True, slots=True)
class Look:
    """All replicas that answered, at one time."""

    time: float
    samples: Mapping[str, ReplicaSample]


class RealFleet:
    """``quire up`` as a child, and a thread that scrapes every ready replica."""

    def __init__(self, command: list[str], *, scrape_seconds: float) -> None:
        self.events: list[Event] = []
        self.looks: list[Look] = []
        self._changed = threading.Condition()
        self._over = threading.Event()
        self._process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        self._threads = [
            threading.Thread(target=self._read),
            threading.Thread(target=self._watch, args=(scrape_seconds,)),
        ]
        for thread in self._threads:
            thread.start()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            with self._changed:
                self.events.append(json.loads(line))
                self._changed.notify_all()
        with self._changed:
            self._changed.notify_all()

    def _watch(self, period: float) -> None:
        begun = time.monotonic()
        while not self._over.is_set():
            samples = {}
            for name, url in self._ready().items():
                sample = _scrape(url)
                if sample is not None:
                    samples[name] = sample
            self.looks.append(Look(time.time(), samples))
            self._over.wait(period - (time.monotonic() - begun) % period)

    def _ready(self) -> dict[str, str]:
        """URLs of the replicas that are ready or drain."""
        urls: dict[str, str] = {}
        for event in list(self.events):
            if event["event"] == "phase" and event["process"] != "gateway":
                if event["phase"] in ("Ready", "Draining"):
                    urls[event["process"]] = event["url"]
                else:
                    urls.pop(event["process"], None)
        return urls

    def wait_for(self, found: Callable[[list[Event]], bool], timeout_seconds: float) -> None:
        with self._changed:
            ended = self._changed.wait_for(
                lambda: found(self.events) or self._process.poll() is not None, timeout_seconds
            )
            if not (ended and found(self.events)):
                raise SystemExit(f"the fleet did not get ready: {self.events[-3:]}")

    def end(self) -> None:
        self._over.set()
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGINT)
        self._process.wait()
        for thread in self._threads:
            thread.join()


def _scrape(url: str) -> ReplicaSample | None:
    try:
        with urllib.request.urlopen(f"{url}/metrics", timeout=2.0) as answer:
            return sample_of(points(answer.read().decode(), NAMES), time=time.time())
    except OSError:
        return None


@contextmanager
def real_fleet(file: Path, replicas: int, *, paced: str | None, scrape_seconds: float = 1.0) -> Iterator[RealFleet]:
    """Until all ``replicas`` are ready, and to its end; with ``paced`` the engines' steps take the time it says."""
    command = [str(BIN / "quire"), "up", "-f", str(file), "--port", str(PORT)]
    if paced is not None:
        command = [sys.executable, str(HERE / "paced_up.py"), paced, str(file), str(PORT)]
    fleet = RealFleet(command, scrape_seconds=scrape_seconds)
    try:
        fleet.wait_for(lambda events: _num_ready(events) >= replicas and _is_up(events), 180.0)
        yield fleet
    finally:
        fleet.end()


def _num_ready(events: list[Event]) -> int:
    last = {e["process"]: e["phase"] for e in events if e["event"] == "phase" and e["process"] != "gateway"}
    return sum(phase == "Ready" for phase in last.values())


def _is_up(events: list[Event]) -> bool:
    return any(event["event"] == "ready" for event in events)


def startup_seconds(events: list[Event]) -> float:
    """From the first replica's start to its being ready."""
    phases = [e for e in events if e["event"] == "phase" and e["process"] != "gateway"]
    first = phases[0]["process"]
    ready = next(e for e in phases if e["process"] == first and e["phase"] == "Ready")
    return moment(ready) - moment(phases[0])


def later_startup_seconds(events: list[Event]) -> float | None:
    """The mean of those that were started beside others that served; None where none was."""
    begun: dict[str, float] = {}
    took: list[float] = []
    for event in events:
        if event["event"] != "phase" or event["process"] == "gateway":
            continue
        name, at = event["process"], moment(event)
        if event["phase"] == "Ready":
            if name in begun:
                took.append(at - begun.pop(name))
        elif event["phase"] in _STARTING:
            begun.setdefault(name, at)
        else:
            begun.pop(name, None)
    later = took[1:]
    return sum(later) / len(later) if later else None


def bench(out: Path, *arguments: str) -> Event:
    """What ``quire bench`` measured."""
    command = [str(BIN / "quire"), "bench", "--base-url", f"http://127.0.0.1:{PORT}/v1", "--json", str(out), *arguments]
    done = subprocess.run(command, check=False, stdout=subprocess.DEVNULL)
    if done.returncode == 2:
        raise SystemExit("the load could not be sent")
    result: Event = json.loads(out.read_text())
    return result
