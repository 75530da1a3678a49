"""Is the simulator right? One part of a trace on real local processes, and the same arrivals simulated; side by side.

Starts ``quire up`` (engines, gateway, autoscaler) on the demo model and calibrates an engine model on it by a short run
of its own, whose shapes are not the trace's. Then replays the trace, scraping each replica once a second, simulates
what was sent, and compares waiting requests, KV use and time to first token over time.

    python benchmarks/autoscaling/validate.py --trace azure_llm_2023_code.csv --out out/validation
    python benchmarks/autoscaling/validate.py … --fleet 1      one replica (or 2), whatever the autoscaler recommends
    python benchmarks/autoscaling/validate.py … --paced        steps that sleep: for machines with busy cores

The error of a curve is the mean distance between the two over 10-second bins, divided by the mean of the real one.
"""

import argparse
import json
import sys
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from curves import Curves, curves, error, plot
from quire_operator.bench.traces import Replay, read_trace
from quire_operator.domain.autoscaler import Policy
from quire_operator.domain.observation import Observation, ReplicaSample
from quire_operator.domain.quantities import parse_duration_seconds
from quire_operator.domain.rates import Evidence, Work
from quire_operator.local.documents import read_deployments
from quire_operator.simulation.run import Outcome, Run
from quire_operator.simulation.scaler import QuireScaler, Scaling
from quire_operator.simulation.scenario import EngineModel, Scenario
from quire_operator.simulation.simulate import simulate
from quire_operator.simulation.workload import requests_of
from real_fleet import Event, Look, RealFleet, bench, moment, real_fleet, startup_seconds

ROOT = Path(__file__).resolve().parents[2]
MAX_REPLICAS = 3
PACE = {
    "step_seconds": 0.03,
    "prefill_tokens_per_second": 2000.0,
    "decode_seconds_per_sequence": 0.001,
    "num_blocks": 200,
    "load_seconds": 20.0,
}
WINDOW_SECONDS = 3.0

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

# Loads of the calibration: few and many at a time, long and short prompts, long and short answers.
CALIBRATION = (
    ("--concurrency", "1", "--input-tokens", "16", "--output-tokens", "200", "--requests", "3"),
    ("--concurrency", "5", "--input-tokens", "16", "--output-tokens", "200", "--requests", "15"),
    ("--concurrency", "40", "--input-tokens", "24", "--output-tokens", "100", "--requests", "70"),
    ("--concurrency", "40", "--input-tokens", "300", "--output-tokens", "4", "--requests", "90"),
    ("--concurrency", "40", "--input-tokens", "150", "--output-tokens", "30", "--requests", "100"),
)


class Fixed:
    """As many as there are."""

    period_seconds, scrape_seconds = 15.0, 0.0

    def decide(self, observation: Observation, now: float) -> Scaling:
        assert observation.target is not None
        return Scaling(replicas=observation.target)


def spec_file(out: Path, name: str, *, mode: str, replicas: int) -> Path:
    file = out / f"{name}.yaml"
    model = ROOT / "examples/models/quire-demo"
    file.write_text(SPEC.format(model=model, mode=mode, replicas=replicas, most=MAX_REPLICAS))
    return file


# --- calibration ---


def calibrate(out: Path, paced: str | None, replicas: int) -> tuple[EngineModel, tuple[float, ...], float]:
    """An engine's speed, by how much it slows down with 1, 2 … busy replicas beside it, and its start-up delay."""
    model, startup, paces = None, 0.0, []
    for count in range(1, replicas + 1):
        file = spec_file(out, f"calibration-{count}", mode="Recommend", replicas=count)
        with real_fleet(file, count, paced=paced, scrape_seconds=0.5) as fleet:
            for number, load in enumerate(CALIBRATION):
                if count == 1 or number == len(CALIBRATION) - 1:
                    bench(out / "calibration.json", *scaled(load, count), "--jitter", "0.5", "--seed", str(number))
        work = list(busy_work(fleet))
        if model is None:
            model, startup = fitted(work, fleet), startup_seconds(fleet.events)
        paces.append(sum(w.busy_seconds for w in work) / sum(expected_seconds(model, w) for w in work))
    assert model is not None
    return model, tuple(pace / paces[0] for pace in paces), startup


def scaled(load: tuple[str, ...], count: int) -> list[str]:
    """As many times the requests, and at once."""
    words = list(load)
    for flag in ("--concurrency", "--requests"):
        place = words.index(flag) + 1
        words[place] = str(int(words[place]) * count)
    return words


def busy_work(fleet: RealFleet) -> list[Work]:
    """What each replica did in stretches of some seconds in which all of them were busy at each look; by the clock on
    the wall. Shorter ones would say little: counters move a step, or a whole prompt, at a time."""
    found: list[Work] = []
    first: Look | None = None
    for before, after in zip(fleet.looks, fleet.looks[1:], strict=False):
        first = first or before
        if not _is_busy(before, after):
            first = None
        elif after.time - first.time >= WINDOW_SECONDS:
            found += [_work(first.samples[name], sample) for name, sample in after.samples.items()]
            first = None
    return found


def _is_busy(before: Look, after: Look) -> bool:
    names = before.samples.keys()
    pairs = [(before.samples[name], after.samples[name]) for name in names & after.samples.keys()]
    steady = bool(names) and names == after.samples.keys()
    return steady and all(a.running > 0 and b.running > 0 and _steps(a, b) > 0 for a, b in pairs)


def _steps(before: ReplicaSample, after: ReplicaSample) -> float:
    return (after.steps or 0.0) - (before.steps or 0.0)


def _work(before: ReplicaSample, after: ReplicaSample) -> Work:
    cached = after.cached_prompt_tokens - before.cached_prompt_tokens
    return Work(
        steps=_steps(before, after),
        prefill_tokens=after.prompt_tokens - before.prompt_tokens - cached,
        generation_tokens=after.generation_tokens - before.generation_tokens,
        busy_seconds=after.time - before.time,
    )


def fitted(work: list[Work], fleet: RealFleet) -> EngineModel:
    """By the fit that the autoscaler learns by, over the time that passed rather than the time in steps."""
    last = next(iter(fleet.looks[-1].samples.values()), None) or next(
        sample for look in reversed(fleet.looks) for sample in look.samples.values()
    )
    evidence = Evidence().with_requests(requests=100.0, prompt_tokens=1.0, output_tokens=1.0)
    for each in work:
        evidence = evidence.with_work(each)
    rates = evidence.rates(kv_tokens=last.kv_tokens_capacity)
    if rates is None:
        raise SystemExit(f"the calibration saw too little: {len(work)} busy intervals")
    return EngineModel(
        prefill_tokens_per_second=rates.prefill_tokens_per_second,
        step_seconds=rates.step_seconds,
        decode_seconds_per_sequence=rates.decode_seconds_per_token,
        kv_tokens=round(last.kv_tokens_capacity),
        max_sequences=16,
        max_batched_tokens=512,
        max_model_length=1024,
    )


def calibration_of(model: EngineModel) -> dict[str, float]:
    """As ``quire simulate --engine`` reads it."""
    return {
        "prefill_tokens_per_second": model.prefill_tokens_per_second,
        "step_seconds": model.step_seconds,
        "decode_seconds_per_sequence": model.decode_seconds_per_sequence,
        "kv_tokens": model.kv_tokens,
    }


def expected_seconds(model: EngineModel, work: Work) -> float:
    return (
        work.steps * model.step_seconds
        + work.prefill_tokens / model.prefill_tokens_per_second
        + work.generation_tokens * model.decode_seconds_per_sequence
    )


# --- the replay, and its simulation ---


def part_of(arguments: argparse.Namespace) -> Replay:
    """The part of the trace, cut to the demo model's size."""
    start, duration = parse_duration_seconds(arguments.start), parse_duration_seconds(arguments.duration)
    if start is None or duration is None:
        raise SystemExit("--start and --duration are durations such as 30s or 5m")
    return Replay(
        start_seconds=start,
        duration_seconds=duration,
        speed=arguments.speed,
        scale_input=0.1,
        max_input_tokens=900,
        scale_output=2.0,
        max_output_tokens=100,
    )


def replay(out: Path, arguments: argparse.Namespace, part: Replay, paced: str | None) -> tuple[RealFleet, Event]:
    replicas = 1 if arguments.fleet == "law" else int(arguments.fleet)
    mode = "Enforce" if arguments.fleet == "law" else "Recommend"
    file = spec_file(out, "replay", mode=mode, replicas=replicas)
    with real_fleet(file, replicas, paced=paced) as fleet:
        done = bench(
            out / "bench.json", "--trace", str(arguments.trace),
            "--start", f"{part.start_seconds}s", "--duration", f"{part.duration_seconds}s",
            "--speed", str(part.speed), "--scale-input", str(part.scale_input),
            "--max-input-tokens", str(part.max_input_tokens), "--scale-output", str(part.scale_output),
            "--max-output-tokens", str(part.max_output_tokens),
        )  # fmt: skip
    return fleet, done


def zero_of(fleet: RealFleet, done: Event) -> float:
    """Unix time of the autoscaler's last tick before the load began: where the simulated clock starts."""
    started = moment({"time": done["started_at"]})
    ticks = [moment(event) for event in fleet.events if event["event"] == "decision"]
    return max((tick for tick in ticks if tick <= started), default=started)


def simulated(
    out: Path, arguments: argparse.Namespace, part: Replay, done: Event, scenario: Scenario, zero: float
) -> Run:
    """The same requests when they were really sent."""
    first = moment({"time": done["started_at"]}) - zero
    rows = requests_of(read_trace(arguments.trace), part)
    sent = sorted(first + request["sent_seconds"] for request in done["requests"])
    requests = [replace(row, time=time) for row, time in zip(rows, sent, strict=True)]
    scaler: QuireScaler | Fixed = Fixed()
    if arguments.fleet == "law":
        (spec,) = read_deployments(out / "replay.yaml")
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


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trace", type=Path, required=True, help="Azure CSV or Mooncake JSON lines")
    parser.add_argument("--fleet", choices=("1", "2", "3", "law"), default="law", help="replicas, or who scales them")
    parser.add_argument("--paced", action="store_true", help="engines whose steps sleep instead of computing")
    parser.add_argument("--start", default="0s", help="skip this much of the trace")
    parser.add_argument("--duration", default="5m", help="use this much of it (default 5m)")
    parser.add_argument("--speed", type=float, default=1.0, help="run its clock this much faster")
    parser.add_argument("--out", type=Path, default=Path("out/validation"), help="folder of the results")
    arguments = parser.parse_args()
    out: Path = arguments.out
    out.mkdir(parents=True, exist_ok=True)

    part = part_of(arguments)
    paced = json.dumps(PACE) if arguments.paced else None
    # Engines that sleep do not slow one another down.
    most = 1 if arguments.paced else MAX_REPLICAS if arguments.fleet == "law" else int(arguments.fleet)
    model, slowdown, startup = calibrate(out, paced, most)
    print(f"calibrated: {model}\nslowdown {slowdown}, start-up {startup:.1f} s", flush=True)
    (out / "engine.json").write_text(json.dumps(calibration_of(model)) + "\n")
    fleet, done = replay(out, arguments, part, paced)
    scenario = Scenario(
        engine=model,
        startup_delay_seconds=startup,
        max_replicas=MAX_REPLICAS,
        initial_replicas=1 if arguments.fleet == "law" else int(arguments.fleet),
        startup_jitter=0.0,
        drain_seconds=60.0,
        slowdown=slowdown[1:] and slowdown,
        timeline_seconds=1.0,
    )
    zero = zero_of(fleet, done)
    run = simulated(out, arguments, part, done, scenario, zero)
    end = max(max(r.arrival for r in run.requests), 1.0)
    real, other = real_curves(fleet, done, zero, end), simulated_curves(run, end)
    errors = {
        name: error(getattr(real, name), getattr(other, name)) for name in ("waiting", "kv_percent", "ttft", "replicas")
    }
    document: dict[str, Any] = {
        "arguments": {key: str(value) for key, value in vars(arguments).items()},
        "engine": asdict(model),
        "slowdown": slowdown,
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
