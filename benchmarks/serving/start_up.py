#!/usr/bin/env python3
"""From the start of quire-engine to the first token over HTTP, by phase, and the most memory either process took.

    python benchmarks/serving/start_up.py [--model DIR] [--repeats 3] [--threads 2] [--kinds both] [--json FILE]

``cold`` begins with an empty folder of compiled kernels, ``warm`` with one that an earlier start has filled; they take
turns, and medians are told. The checkpoint is in the page cache either way: reading a disk is not measured here.
"""

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import TypeVar

from processes import DEMO_MODEL

sys.path.insert(0, str(Path(__file__).parents[1] / "kv"))
from report import at_least_one, save, show

KINDS = ("warm", "cold")
ALLOWED_MB = 900
"""For the engine process beside weights and KV cache."""
API_LIMIT_MB = 150
_PATIENCE_SECONDS = 300.0
_LOOK_SECONDS = 0.02
_MIB = 1 << 20

Found = TypeVar("Found")


@dataclass(frozen=True, slots=True, kw_only=True)
class Start:
    kind: str
    listening_seconds: float
    first_token_seconds: float
    phase_seconds: dict[str, float]
    api_peak_mib: float
    engine_peak_mib: float
    weights_mib: float
    kv_cache_mib: float

    @property
    def beside_mib(self) -> float:
        """What the engine process took beside weights and KV cache."""
        return self.engine_peak_mib - self.weights_mib - self.kv_cache_mib


@contextmanager
def started(model: Path, threads: int, cache: Path) -> Iterator[tuple["subprocess.Popen[bytes]", Path]]:
    """The process and the file its log goes to."""
    command = [sys.executable, "-m", "quire_engine", "--model", str(model), "--served-model-name", "model"]
    command += ["--host", "127.0.0.1", "--port", "0", "--threads", str(threads)]
    command += ["--kv-cache-memory-bytes", "64MiB", "--log-format", "text"]
    environment = {**os.environ, "XDG_CACHE_HOME": str(cache)}
    environment.pop("NUMBA_CACHE_DIR", None)
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "log"
        with log.open("w") as written, subprocess.Popen(command, stderr=written, env=environment) as child:
            try:
                yield child, log
            finally:
                child.terminate()
                child.wait(30)


def one_start(kind: str, model: Path, threads: int, cache: Path) -> Start:
    began = time.monotonic()
    with started(model, threads, cache) as (child, log):
        address = _wait(child, log, lambda: _address(log))
        assert address is not None
        listening = time.monotonic() - began
        _wait(child, log, lambda: _first_token(address))
        first_token = time.monotonic() - began
        with urllib.request.urlopen(f"{address}/metrics") as response:
            metrics = response.read().decode()
        (engine_pid,) = Path(f"/proc/{child.pid}/task/{child.pid}/children").read_text().split()
        return Start(
            kind=kind,
            listening_seconds=listening,
            first_token_seconds=first_token,
            phase_seconds={
                phase: float(value)
                for phase, value in re.findall(r'^quire_startup_seconds\{.*phase="(\w+)".*\} (\S+)$', metrics, re.M)
            },
            api_peak_mib=_peak_mib(child.pid),
            engine_peak_mib=_peak_mib(int(engine_pid)),
            weights_mib=_gauge(metrics, "quire_model_bytes") / _MIB,
            kv_cache_mib=_gauge(metrics, "quire_kv_cache_bytes") / _MIB,
        )


def _address(log: Path) -> str | None:
    found = re.search(r"listening on (http://\S+);", log.read_text())
    return found[1] if found else None


def _first_token(address: str) -> bool:
    body = json.dumps({"model": "model", "prompt": "One", "max_tokens": 1}).encode()
    request = urllib.request.Request(f"{address}/v1/completions", body, {"Content-Type": "application/json"})
    try:
        with urllib.request.urlopen(request) as response:
            response.read()
    except urllib.error.HTTPError as error:
        if error.code != 503:  # the engine is starting
            raise SystemExit(f"the first request got {error.code}: {error.read().decode()}") from error
        return False
    return True


def _wait(child: "subprocess.Popen[bytes]", log: Path, look: Callable[[], Found]) -> Found:
    """Until ``look`` finds something."""
    end = time.monotonic() + _PATIENCE_SECONDS
    while not (found := look()):
        if child.poll() is not None or time.monotonic() > end:
            raise SystemExit(f"the server did not start:\n{log.read_text()}")
        time.sleep(_LOOK_SECONDS)
    return found


def _gauge(metrics: str, name: str) -> float:
    found = re.search(rf"^{name}\{{.*\}} (\S+)$", metrics, re.M)
    assert found is not None, name
    return float(found[1])


def _peak_mib(pid: int) -> float:
    found = re.search(r"VmHWM:\s+(\d+) kB", Path(f"/proc/{pid}/status").read_text())
    assert found is not None
    return int(found[1]) / 1024


def in_turn(kinds: Sequence[str], model: Path, threads: int, repeats: int) -> list[Start]:
    with tempfile.TemporaryDirectory() as folder:
        filled = Path(folder) / "warm"
        if "warm" in kinds:
            _tell(one_start("warm", model, threads, filled), counts=False)
        starts = []
        for number in range(repeats):
            for kind in kinds:
                cache = filled if kind == "warm" else Path(folder) / f"cold{number}"
                starts.append(one_start(kind, model, threads, cache))
                _tell(starts[-1])
        return starts


def _tell(start: Start, *, counts: bool = True) -> None:
    remark = "" if counts else ", which fills the cache and does not count"
    print(f"{start.kind}: first token after {start.first_token_seconds:.1f} s{remark}", file=sys.stderr, flush=True)


def rows(starts: Sequence[Start], kinds: Sequence[str]) -> list[tuple[str, ...]]:
    """A line for each figure, a column for each kind: medians."""
    of_kind = [[start for start in starts if start.kind == kind] for kind in kinds]

    def line(name: str, digits: int, value: Callable[[Start], float]) -> tuple[str, ...]:
        return (name, *(f"{median(map(value, group)):.{digits}f}" for group in of_kind))

    return [
        line("listening after, s", 2, lambda start: start.listening_seconds),
        line("first token after, s", 2, lambda start: start.first_token_seconds),
        *(
            line(f"  of these {phase}", 2, lambda start, phase=phase: start.phase_seconds[phase])
            for phase in starts[0].phase_seconds
        ),
        line("engine process, peak MiB", 0, lambda start: start.engine_peak_mib),
        line("  beside weights and KV cache", 0, lambda start: start.beside_mib),
        line("API process, peak MiB", 0, lambda start: start.api_peak_mib),
    ]


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--model", type=Path, default=DEMO_MODEL, help="a model folder (default: the demo model)")
    arguments.add_argument("--repeats", type=at_least_one, default=3, help="of each kind (default 3)")
    arguments.add_argument("--threads", type=at_least_one, default=2, help="of the engine process (default 2)")
    arguments.add_argument("--kinds", choices=(*KINDS, "both"), default="both", help="of starts (default both)")
    arguments.add_argument("--json", type=Path, help="write every start here too")
    args = arguments.parse_args()
    if not (args.model / "config.json").is_file():
        arguments.error(f"--model {args.model}: no model folder, since it has no config.json")
    kinds = KINDS if args.kinds == "both" else (args.kinds,)
    starts = in_turn(kinds, args.model, args.threads, args.repeats)
    title = f"Start of quire-engine over {args.model.name}, medians of {args.repeats}"
    notes = (
        f"the engine process is to stay within weights + KV cache + {ALLOWED_MB} MB, the API process within"
        f" {API_LIMIT_MB} MB",
    )
    show(title, ("", *kinds), rows(starts, kinds), notes)
    save(args.json, [asdict(start) for start in starts])


if __name__ == "__main__":
    main()
