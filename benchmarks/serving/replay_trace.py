"""Replays ten minutes of a production trace on a scaling LLMDeployment, and keeps what the autoscaler said.

Starts ``quire up`` on the file, lets ``quire bench`` replay the trace against it, waits until the replicas are back at
the minimum, drains, and writes ``replay.json`` (every log line of ``quire up``), ``bench.json``, ``replay.md`` (the
table of decisions) and ``replay.png`` (arrivals, replicas, time to first token on one clock). Only drives packaged
commands.

    python benchmarks/serving/replay_trace.py --trace azure_llm_2023_code.csv --out out/replay
"""

import argparse
import json
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from datetime import datetime
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
BIN = Path(sys.executable).parent
Event = dict[str, Any]


class Served:
    """``quire up`` as a child: its log lines as they come, its end on leaving."""

    def __init__(self, file: Path, port: int) -> None:
        self.events: list[Event] = []
        self._changed = threading.Condition()
        self._process = subprocess.Popen(
            [BIN / "quire", "up", "-f", file, "--port", str(port)], stdout=subprocess.PIPE, text=True
        )
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            with self._changed:
                self.events.append(json.loads(line))
                self._changed.notify_all()
        with self._changed:
            self._changed.notify_all()

    def wait_for(self, found: Callable[[list[Event]], bool], timeout_seconds: float) -> bool:
        with self._changed:
            return self._changed.wait_for(
                lambda: found(self.events) or self._process.poll() is not None, timeout_seconds
            ) and found(self.events)

    def end(self) -> None:
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGINT)
        self._process.wait()
        self._reader.join()


def is_ready(events: list[Event]) -> bool:
    return any(event["event"] == "ready" for event in events)


def ready_replicas(events: list[Event]) -> list[tuple[float, int]]:
    """(wall time, replicas ready) at each change."""
    ready: set[str] = set()
    steps = []
    for event in events:
        if event["event"] == "phase" and event["process"] != "gateway":
            (ready.add if event["phase"] == "Ready" else ready.discard)(event["process"])
            steps.append((moment(event), len(ready)))
    return steps


def scaled(events: list[Event]) -> list[Event]:
    return [event for event in events if event["event"] == "decision" and event["changed"]]


def moment(event: Event) -> float:
    return datetime.fromisoformat(event["time"]).timestamp()


def measure(arguments: argparse.Namespace) -> int:
    out: Path = arguments.out
    out.mkdir(parents=True, exist_ok=True)
    served = Served(arguments.file, arguments.port)
    try:
        if not served.wait_for(is_ready, 120):
            print(f"quire up did not become ready: {served.events[-1:]}", file=sys.stderr)
            return 1
        bench = subprocess.run(
            [
                BIN / "quire", "bench", "--base-url", f"http://127.0.0.1:{arguments.port}/v1",
                "--trace", arguments.trace, "--start", arguments.start, "--duration", arguments.duration,
                "--scale-input", str(arguments.scale_input), "--scale-output", str(arguments.scale_output),
                "--max-input-tokens", str(arguments.max_input_tokens),
                "--max-output-tokens", str(arguments.max_output_tokens),
                "--json", out / "bench.json", "--plot", out / "bench.png",
            ],
            check=False,
        )  # fmt: skip
        if bench.returncode == 2:
            return 2
        done = time.time()
        print("waiting for the replicas to go back to where they began", flush=True)
        back = served.wait_for(
            lambda events: bool(steps := ready_replicas(events)) and steps[-1][1] <= 1, arguments.settle_seconds
        )
        print(f"back after {time.time() - done:.0f} s" if back else "they did not go back in time")
    finally:
        served.end()
    report(out, served.events, json.loads((out / "bench.json").read_text()))
    return bench.returncode or (0 if back else 1)


def report(out: Path, events: list[Event], bench: Event) -> None:
    (out / "replay.json").write_text(json.dumps(events, indent=1) + "\n")
    start = datetime.fromisoformat(bench["started_at"]).timestamp()
    (out / "replay.md").write_text("\n".join(markdown(events, bench, start)) + "\n")
    plot(out / "replay.png", events, bench, start)
    print((out / "replay.md").read_text())


def markdown(events: list[Event], bench: Event, start: float) -> list[str]:
    summary = bench["summary"]
    lines = [
        f"{summary['succeeded']} of {summary['requests']} requests answered with 200, {summary['short']} of them short;"
        f" {summary['prompt_tokens']:,} prompt and {summary['output_tokens']:,} output tokens "
        f"in {summary['duration_seconds']:.0f} s.",
        "",
        "| | p50 | p95 | p99 |",
        "|---|---|---|---|",
    ]
    for name, key in (("TTFT", "ttft_seconds"), ("ITL", "itl_seconds"), ("E2E", "e2e_seconds")):
        values = summary[key]
        cells = " | ".join(f"{values[p] * 1000:,.0f} ms" for p in ("p50", "p95", "p99"))
        lines.append(f"| {name} | {cells} |")
    lines += ["", "| at | replicas | why |", "|---|---|---|"]
    for event in scaled(events):
        why = event["message"].split(": ", 2)[-1]
        lines.append(f"| {moment(event) - start:.0f} s | {event['from']} → {event['to']} | {why} |")
    return lines


def plot(path: Path, events: list[Event], bench: Event, start: float) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 8), layout="constrained")
    load, count, first = figure.subplots(3, 1, sharex=True)
    figure.suptitle("A production trace on one LLMDeployment")
    requests = bench["requests"]
    load.hist([r["sent_seconds"] for r in requests], bins=range(0, int(requests[-1]["end_seconds"]) + 10, 10))
    load.set(ylabel="arrivals per 10 s")
    steps = [(at - start, number) for at, number in ready_replicas(events)]
    count.step([at for at, _ in steps], [number for _, number in steps], where="post", label="ready")
    wanted = [(moment(e) - start, e["to"]) for e in events if e["event"] == "decision"]
    count.step([at for at, _ in wanted], [to for _, to in wanted], where="post", linestyle="--", label="decided")
    count.set(ylabel="replicas", ylim=(0, None))
    count.legend()
    timed = [(r["sent_seconds"], r["first_token_seconds"] - r["sent_seconds"]) for r in requests if not r["error"]]
    first.plot([at for at, _ in timed], [value for _, value in timed], ".", markersize=3)
    first.set(ylabel="time to first token (s)", xlabel="seconds since the first request", ylim=(0, None))
    figure.savefig(path, dpi=110)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trace", type=Path, required=True, help="Azure CSV or Mooncake JSON lines")
    parser.add_argument("--file", type=Path, default=ROOT / "examples/demo.yaml", help="the LLMDeployment")
    parser.add_argument("--port", type=int, default=8000)
    parser.add_argument("--start", default="0s", help="skip this much of the trace (default 0s)")
    parser.add_argument("--duration", default="10m", help="use this much of it (default 10m)")
    parser.add_argument("--scale-input", type=float, default=0.1, help="prompt lengths times this (default 0.1)")
    parser.add_argument("--scale-output", type=float, default=1.0, help="answer lengths times this (default 1)")
    parser.add_argument("--max-input-tokens", type=int, default=1000)
    parser.add_argument("--max-output-tokens", type=int, default=400)
    parser.add_argument(
        "--settle-seconds", type=float, default=400, help="how long to wait for 1 replica (default 400)"
    )
    parser.add_argument(
        "--out", type=Path, default=Path("out/replay"), help="folder of the results (default out/replay)"
    )
    return measure(parser.parse_args())


if __name__ == "__main__":
    sys.exit(main())
