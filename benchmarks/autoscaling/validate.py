"""Is the simulator right? One part of a trace on real local processes, and the same arrivals simulated; side by side.

Starts ``quire up`` (engines, gateway, autoscaler) on the demo model and calibrates an engine model on it by runs of its
own, whose shapes are not the trace's. Then replays the trace, its clock as fast as keeps ``--load`` of the fleet busy,
scraping each replica once a second, simulates what was sent, and compares waiting requests, KV use and time to first
token over time.

    python benchmarks/autoscaling/validate.py --trace azure_llm_2023_code.csv --out out/validation
    python benchmarks/autoscaling/validate.py … --fleet 1      one replica (or 2), whatever the autoscaler recommends
    python benchmarks/autoscaling/validate.py … --paced        steps that sleep: for machines with busy cores

The error of a curve is the mean distance between the two over 10-second bins, divided by the mean of the real one.
"""

import argparse
import json
import signal
import sys
from collections.abc import Sequence
from dataclasses import asdict, replace
from functools import partial
from math import inf
from pathlib import Path
from typing import Any

from calibration import Calibration, calibrate
from curves import Curves, curves, error, plot
from loads import busy_seconds
from quire_cli.bench.traces import Replay, TraceError, TraceRow, read_trace
from quire_cli.local.documents import read_deployments
from quire_cli.simulation.run import Outcome, Run
from quire_cli.simulation.scaler import QuireScaler, Scaling
from quire_cli.simulation.scenario import Request, Scenario
from quire_cli.simulation.simulate import simulate
from quire_cli.simulation.workload import requests_of
from quire_operator.domain.autoscaling.autoscaler import Policy
from quire_operator.domain.autoscaling.observation import Observation
from quire_operator.domain.resource.quantities import parse_duration_seconds
from real_fleet import Event, Look, RealFleet, bench, later_startup_seconds, moment, real_fleet

ROOT = Path(__file__).resolve().parents[2]
MAX_REPLICAS = 3
PACE = {
    "step_seconds": 0.03,
    "prefill_tokens_per_second": 2000.0,
    "decode_seconds_per_sequence": 0.001,
    "num_blocks": 200,
    "load_seconds": 20.0,
}
SPEC = """apiVersion: quire.dev/v1alpha1
kind: LLMDeployment
metadata: {{name: chat}}
spec:
  model: {{source: "file://{model}"}}
  engine: {{maxModelLength: 1024, maxSequences: 16, maxBatchedTokens: 512, kvCache: {{size: 9600Ki}}}}
  replicas: {replicas}
  autoscaling:
    mode: {mode}
    minReplicas: 1
    maxReplicas: {most}
    scaleDown: {{window: 60s, period: 30s}}
  drain: {{timeout: 60s}}
"""

COMPUTED = Replay(scale_input=0.4, max_input_tokens=900, scale_output=0.5, max_output_tokens=50)
"""Long prompts and short answers: a small model writes quicker than a client and a gateway on the same cores read."""
PACED = Replay(scale_input=0.1, max_input_tokens=900, scale_output=2.0, max_output_tokens=100)
_LAW_REPLICAS = 2
"""What the autoscaler is to come to on average."""


class Fixed:
    """As many as there are."""

    period_seconds, scrape_seconds = 15.0, 0.0

    def decide(self, observation: Observation, now: float) -> Scaling:
        assert observation.target is not None
        return Scaling(replicas=observation.target)


def spec_file(out: Path, name: str, mode: str, replicas: int) -> Path:
    file = out / f"{name}-{replicas}.yaml"
    model = ROOT / "examples/models/quire-demo"
    file.write_text(SPEC.format(model=model, mode=mode, replicas=replicas, most=MAX_REPLICAS))
    return file


# --- the replay, and its simulation ---


def part_of(arguments: argparse.Namespace, rows: Sequence[TraceRow], calibration: Calibration) -> Replay:
    """The part of the trace, cut to the demo model's size, its clock set by what the fleet can do."""
    bent, speed = PACED if arguments.paced else COMPUTED, arguments.speed
    if speed is None:
        replicas = _LAW_REPLICAS if arguments.fleet == "law" else int(arguments.fleet)
        speed = speed_for(arguments.load, requests_of(rows, bent), calibration, replicas)
    return replace(bent, start_seconds=arguments.start, duration_seconds=arguments.duration * speed, speed=speed)


def speed_for(load: float, requests: Sequence[Request], calibration: Calibration, replicas: int) -> float:
    """How much faster the trace's clock has to run to keep that share of the replicas busy."""
    seconds = max(1.0, requests[-1].time - requests[0].time)
    busy = busy_seconds(requests, calibration.model) * calibration.slowed(replicas) / seconds
    return round(load * replicas / busy, 2)


def replay(out: Path, arguments: argparse.Namespace, part: Replay, paced: str | None) -> tuple[RealFleet, Event, Path]:
    replicas = 1 if arguments.fleet == "law" else int(arguments.fleet)
    mode = "Enforce" if arguments.fleet == "law" else "Recommend"
    file = spec_file(out, "replay", mode, replicas)
    with real_fleet(file, replicas, paced=paced) as fleet:
        done = bench(
            out / "bench.json", "--trace", str(arguments.trace),
            "--start", f"{part.start_seconds}s", "--duration", f"{part.duration_seconds}s",
            "--speed", str(part.speed), "--scale-input", str(part.scale_input),
            "--max-input-tokens", str(part.max_input_tokens), "--scale-output", str(part.scale_output),
            "--max-output-tokens", str(part.max_output_tokens),
        )  # fmt: skip
    return fleet, done, file


def zero_of(fleet: RealFleet, done: Event) -> float:
    """Unix time of the autoscaler's last tick before the load began: where the simulated clock starts."""
    started = moment({"time": done["started_at"]})
    ticks = [moment(event) for event in fleet.events if event["event"] == "decision"]
    return max((tick for tick in ticks if tick <= started), default=started)


def simulated(file: Path, told: Sequence[Request], done: Event, scenario: Scenario, zero: float, *, law: bool) -> Run:
    """The same requests when they were really sent."""
    first = moment({"time": done["started_at"]}) - zero
    sent = sorted(first + request["sent_seconds"] for request in done["requests"])
    requests = [replace(request, time=time) for request, time in zip(told, sent, strict=True)]
    scaler: QuireScaler | Fixed = Fixed()
    if law:
        (spec,) = read_deployments(file)
        policy = Policy.of(spec)
        assert policy is not None
        scaler = QuireScaler(policy)
    return simulate(requests, scenario, scaler)


def real_curves(fleet: RealFleet, done: Event, zero: float, end: float) -> Curves:
    looks = [look for look in fleet.looks if look.samples]
    started = moment({"time": done["started_at"]}) - zero
    firsts = [
        (started + r["sent_seconds"], r["first_token_seconds"] - r["sent_seconds"])
        for r in done["requests"]
        if not r["error"]
    ]
    return curves(
        [(look.time - zero, _waiting(look), _kv_percent(look), float(len(look.samples))) for look in looks],
        firsts,
        end,
    )


def _waiting(look: Look) -> float:
    return sum(sample.waiting for sample in look.samples.values())


def _kv_percent(look: Look) -> float:
    samples = look.samples.values()
    return 100 * sum(s.kv_tokens_used for s in samples) / sum(s.kv_tokens_capacity for s in samples)


def simulated_curves(run: Run, end: float) -> Curves:
    firsts = [(r.arrival, r.first_token - r.arrival) for r in run.requests if r.first_token is not None]
    points = [(p.time, float(p.waiting + p.held), 100 * p.kv_usage, float(p.ready)) for p in run.timeline]
    return curves(points, firsts, end)


def _duration(text: str) -> float:
    seconds = parse_duration_seconds(text)
    if seconds is None:
        raise argparse.ArgumentTypeError(f"{text!r} is not a duration; write it like 30s or 5m")
    return seconds


def _positive(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < inf:
        raise argparse.ArgumentTypeError(f"{text!r} should be a number above 0")
    return value


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trace", type=Path, required=True, help="Azure CSV or Mooncake JSON lines")
    parser.add_argument("--fleet", choices=("1", "2", "3", "law"), default="law", help="replicas, or who scales them")
    parser.add_argument("--paced", action="store_true", help="engines whose steps sleep instead of computing")
    parser.add_argument("--start", type=_duration, default="0s", help="skip this much of the trace")
    parser.add_argument("--duration", type=_duration, default="5m", help="how long to replay it (default 5m)")
    parser.add_argument("--speed", type=_positive, help="run its clock this much faster (default: by --load)")
    parser.add_argument(
        "--load", type=_positive, default=0.8, help="share of the fleet kept busy on average (default 0.8)"
    )
    parser.add_argument("--out", type=Path, default=Path("out/validation"), help="folder of the results")
    arguments = parser.parse_args()
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # whatever was started is ended
    out: Path = arguments.out
    out.mkdir(parents=True, exist_ok=True)

    try:
        rows = read_trace(arguments.trace)
    except OSError as problem:
        parser.error(f"cannot read the trace {arguments.trace}: {problem.strerror}")
    except TraceError as problem:
        parser.error(f"{arguments.trace}: {problem}")
    paced = json.dumps(PACE) if arguments.paced else None
    # Engines that sleep do not slow one another down.
    most = 1 if arguments.paced else MAX_REPLICAS if arguments.fleet == "law" else int(arguments.fleet)
    calibration = calibrate(out, partial(spec_file, out, "calibration", "Recommend"), paced, most)
    print(f"calibrated: {calibration}", flush=True)
    (out / "engine.json").write_text(json.dumps(calibration.as_file()) + "\n")
    part = part_of(arguments, rows, calibration)
    print(f"the trace's clock runs {part.speed:g} times as fast", flush=True)
    fleet, done, file = replay(out, arguments, part, paced)
    startup = later_startup_seconds(fleet.events) or calibration.startup_seconds
    scenario = Scenario(
        engine=calibration.model,
        # As long as they took this time: they are no more the simulator's to foretell than when requests came.
        startup_delay_seconds=startup,
        max_replicas=MAX_REPLICAS,
        initial_replicas=1 if arguments.fleet == "law" else int(arguments.fleet),
        startup_jitter=0.0,
        drain_seconds=60.0,
        slowdown=calibration.slowdown[1:] and calibration.slowdown,
        timeline_seconds=1.0,
    )
    zero = zero_of(fleet, done)
    run = simulated(file, requests_of(rows, part), done, scenario, zero, law=arguments.fleet == "law")
    end = max(max(r.arrival for r in run.requests), 1.0)
    real, other = real_curves(fleet, done, zero, end), simulated_curves(run, end)
    errors = {
        name: error(getattr(real, name), getattr(other, name)) for name in ("waiting", "kv_percent", "ttft", "replicas")
    }
    document: dict[str, Any] = {
        "arguments": {key: str(value) for key, value in vars(arguments).items()},
        "calibration": asdict(calibration),
        "speed": part.speed,
        "startup_seconds": startup,
        "errors": errors,
        "real": asdict(real),
        "simulated": asdict(other),
        "requests": len(run.requests),
        "turned_away": {
            "real": done["summary"]["requests"] - done["summary"]["succeeded"],
            "simulated": sum(r.outcome is Outcome.FAILED for r in run.requests),
        },
    }
    (out / "validation.json").write_text(json.dumps(document, indent=1) + "\n")
    kind = "paced engines" if arguments.paced else "the demo model"
    who = "the autoscaler" if arguments.fleet == "law" else f"{arguments.fleet} replicas"
    plot(out / "validation.png", f"{kind}, {who}: real and simulated", real, other, errors)
    print("  ".join(f"{name} {value:.1%}" for name, value in errors.items()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
