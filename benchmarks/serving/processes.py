"""quire-engine as processes under measurement: started over the fake runner or the demo model, watched by /proc."""

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

DEMO_MODEL = Path(__file__).parents[2] / "examples" / "models" / "quire-demo"
DEMO_VOCABULARY = 4096
_TICKS = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True, slots=True, kw_only=True)
class Server:
    host: str
    port: int
    api_pid: int
    engine_pid: int


@contextmanager
def serving(
    *flags: str, fake: dict[str, Any] | None = None, model: Path = DEMO_MODEL, threads: int = 1
) -> Iterator[Server]:
    """The demo model, or another, under the name ``demo``; with ``fake`` its tokenizer over the fake runner with these
    options."""
    program = ["-m", "quire_engine"]
    if fake is not None:
        program = ["-m", "quire_engine.server.fake", json.dumps({"vocab_size": DEMO_VOCABULARY, **fake})]
    command = [sys.executable, *program, "--model", str(model), "--served-model-name", "demo"]
    command += ["--host", "127.0.0.1", "--port", "0", "--threads", str(threads), "--log-format", "text", *flags]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as child:
        try:
            host, port = _address_when_ready(child)
            yield Server(host=host, port=port, api_pid=child.pid, engine_pid=_only_child(child.pid))
        finally:
            child.terminate()
            assert child.stderr is not None
            child.stderr.read()
            child.wait(30)


def _address_when_ready(child: "subprocess.Popen[str]") -> tuple[str, int]:
    assert child.stderr is not None
    log = ""
    # The engine process says "ready" of its model before the server does of itself.
    while " ready: demo" not in log:
        line = child.stderr.readline()
        if not line:
            raise SystemExit(f"the server did not start:\n{log}")
        log += line
    found = re.search(r"listening on https?://([\d.]+):(\d+)", log)
    assert found is not None, log
    return found[1], int(found[2])


def _only_child(pid: int) -> int:
    (child,) = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return int(child)


def cpu_seconds(pid: int) -> float:
    """User and system time of a process so far."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / _TICKS


def resident_mib(pid: int) -> float:
    status = Path(f"/proc/{pid}/status").read_text()
    found = re.search(r"VmRSS:\s+(\d+) kB", status)
    assert found is not None
    return int(found[1]) / 1024


def slope(xs: Sequence[float], ys: Sequence[float]) -> float:
    """Of the straight line nearest to the points, by least squares."""
    mean_x, mean_y = sum(xs) / len(xs), sum(ys) / len(ys)
    spread = sum((x - mean_x) ** 2 for x in xs)
    return sum((x - mean_x) * (y - mean_y) for x, y in zip(xs, ys, strict=True)) / spread
