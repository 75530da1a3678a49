"""How fast an engine is here: it is loaded for a while in a few ways, and its speed is fitted to what it got done.

For ``validate.py``. The loads have other shapes than the trace. A quick model is through with a few requests before
anybody looks twice, so each load is tried first and then made as long as ``LOAD_SECONDS``, whatever the model's speed.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from quire_cli.simulation.scenario import EngineModel
from quire_operator.domain.autoscaling.observation import ReplicaSample
from quire_operator.domain.autoscaling.rates import Evidence, Work
from real_fleet import Look, RealFleet, bench, real_fleet, startup_seconds

LOAD_SECONDS = 8.0
WINDOW_SECONDS = 1.5
_LOOK_SECONDS = 0.25
_MOST_REQUESTS = 20_000
_LEAST_WINDOWS = 10


@dataclass(frozen=True, slots=True, kw_only=True)
class CalibrationLoad:
    """So many conversations at a time, all alike."""

    at_once: int
    prompt_tokens: int
    output_tokens: int

    def arguments(self, *, replicas: int, requests: int, seed: int) -> list[str]:
        """Of ``quire bench``."""
        return [
            "--concurrency", str(self.at_once * replicas), "--requests", str(requests),
            "--input-tokens", str(self.prompt_tokens), "--output-tokens", str(self.output_tokens),
            "--jitter", "0.5", "--seed", str(seed),
        ]  # fmt: skip


LOADS = (
    CalibrationLoad(at_once=1, prompt_tokens=16, output_tokens=200),
    CalibrationLoad(at_once=5, prompt_tokens=16, output_tokens=200),
    CalibrationLoad(at_once=40, prompt_tokens=24, output_tokens=100),
    CalibrationLoad(at_once=40, prompt_tokens=500, output_tokens=4),
    CalibrationLoad(at_once=40, prompt_tokens=150, output_tokens=30),
)
"""Few and many at a time, long and short prompts, long and short answers; the last is the mixed one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Calibration:
    model: EngineModel
    slowdown: tuple[float, ...]
    """How many times as long a step takes with 1, 2 … busy replicas on the machine."""
    startup_seconds: float
    windows: int
    """Stretches of some seconds that the speed was fitted to."""
    share_in_steps: float
    """Of those: the engine's own time in steps; the rest passes between two."""

    def slowed(self, replicas: int) -> float:
        return self.slowdown[min(replicas, len(self.slowdown)) - 1]

    def as_file(self) -> dict[str, float]:
        """As ``quire simulate --engine`` reads it."""
        return {
            "prefill_tokens_per_second": self.model.prefill_tokens_per_second,
            "step_seconds": self.model.step_seconds,
            "decode_seconds_per_sequence": self.model.decode_seconds_per_sequence,
            "kv_tokens": self.model.kv_tokens,
        }


def calibrate(out: Path, spec: Callable[[int], Path], paced: str | None, replicas: int) -> Calibration:
    """An engine's speed, by how much it slows down with 1, 2 … busy replicas beside it, and its start-up delay.

    ``spec`` makes the file of a fleet of so many.
    """
    model, startup, windows, in_steps, paces = None, 0.0, 0, 0.0, []
    for count in range(1, replicas + 1):
        with real_fleet(spec(count), count, paced=paced, scrape_seconds=_LOOK_SECONDS) as fleet:
            for number, load in enumerate(LOADS):
                if count == 1 or number == len(LOADS) - 1:
                    _press(out / "calibration.json", load, replicas=count, seed=number)
        work = list(busy_work(fleet.looks))
        if model is None:
            model, startup = fitted(work, capacity_of(fleet)), startup_seconds(fleet.events)
            windows, in_steps = len(work), share_in_steps(fleet.looks)
        paces.append(pace(model, work))
    assert model is not None
    slowdown = tuple(each / paces[0] for each in paces)
    return Calibration(
        model=model, slowdown=slowdown, startup_seconds=startup, windows=windows, share_in_steps=in_steps
    )


def _press(out: Path, load: CalibrationLoad, *, replicas: int, seed: int) -> None:
    """As long as it takes: a try says how many requests that is."""
    first = max(2, 2 * load.at_once) * replicas
    tried = bench(out, *load.arguments(replicas=replicas, requests=first, seed=seed))
    requests = requests_for(LOAD_SECONDS, tried=first, took=float(tried["summary"]["duration_seconds"]))
    bench(out, *load.arguments(replicas=replicas, requests=requests, seed=100 + seed))


def requests_for(seconds: float, *, tried: int, took: float) -> int:
    """By how long some took; never fewer than those."""
    return max(tried, min(_MOST_REQUESTS, math.ceil(tried * seconds / max(took, 1e-3))))


# --- what was seen ---


def busy_work(looks: Sequence[Look]) -> list[Work]:
    """What each replica did in stretches of a second or two in which all of them were busy at each look; by the clock
    on the wall. Shorter ones would say little: counters move a step, or a whole prompt, at a time."""
    found: list[Work] = []
    first: Look | None = None
    for before, after in zip(looks, looks[1:], strict=False):
        first = first or before
        if not _is_busy(before, after):
            first = None
        elif after.time - first.time >= WINDOW_SECONDS:
            found += [_work(first.samples[name], sample) for name, sample in after.samples.items()]
            first = None
    return found


def share_in_steps(looks: Sequence[Look]) -> float:
    """Of the time in which all were busy, by the engines' own clocks."""
    spent, passed = 0.0, 0.0
    for before, after in zip(looks, looks[1:], strict=False):
        if _is_busy(before, after):
            for name, sample in after.samples.items():
                spent += (sample.busy_seconds or 0.0) - (before.samples[name].busy_seconds or 0.0)
                passed += sample.time - before.samples[name].time
    return spent / passed if passed > 0 else 0.0


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


# --- what follows from it ---


def fitted(work: Sequence[Work], kv_tokens: float) -> EngineModel:
    """By the fit that the autoscaler learns by, over the time that passed rather than the time in steps."""
    evidence = Evidence().with_requests(requests=100.0, prompt_tokens=1.0, output_tokens=1.0)
    for each in work:
        evidence = evidence.with_work(each)
    rates = evidence.rates(kv_tokens=kv_tokens)
    if rates is None or len(work) < _LEAST_WINDOWS:
        raise SystemExit(
            f"the calibration saw the engine busy for {len(work)} stretches of {WINDOW_SECONDS:g} s only; "
            f"{_LEAST_WINDOWS} are needed: is something else taking the machine's cores?"
        )
    return EngineModel(
        prefill_tokens_per_second=rates.prefill_tokens_per_second or math.inf,
        step_seconds=rates.step_seconds,
        decode_seconds_per_sequence=rates.decode_seconds_per_token,
        kv_tokens=round(kv_tokens),
        max_sequences=16,
        max_batched_tokens=512,
        max_model_length=1024,
    )


def pace(model: EngineModel, work: Sequence[Work]) -> float:
    """How many times as long as the model says that work took."""
    expected = sum(
        w.steps * model.step_seconds
        + w.prefill_tokens / model.prefill_tokens_per_second
        + w.generation_tokens * model.decode_seconds_per_sequence
        for w in work
    )
    if expected <= 0:
        raise SystemExit("the calibration never saw all replicas busy at once: is something else taking the cores?")
    return sum(w.busy_seconds for w in work) / expected


def capacity_of(fleet: RealFleet) -> float:
    """KV tokens of one replica."""
    for look in reversed(fleet.looks):
        for sample in look.samples.values():
            return sample.kv_tokens_capacity
    raise SystemExit("the calibration never read a replica's metrics")
