"""``quire simulate``: read the trace and the policy, simulate them, report the result."""

import json
import os
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from math import isfinite
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console, Group, RenderableType
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from quire_cli.errors import CapacityProblem, FileProblem, ModelProblem, SimulationProblem
from quire_cli.local import plan as planning
from quire_cli.local.documents import Document, read_manifests
from quire_cli.local.machine import this_machine
from quire_cli.local.model_store import ModelStore
from quire_cli.options import DURATION, plain_console, section
from quire_cli.result_files import results_problem
from quire_cli.simulation import speed
from quire_cli.simulation.fleet import TICK_SECONDS, Crash, Fault, QuireScaler, Scenario, ScrapeOutage, SlowReplicas
from quire_cli.simulation.fleet import simulate as simulate_fleet
from quire_cli.simulation.results import (
    LATE_SECONDS,
    DecisionPoint,
    Distribution,
    RequestResult,
    SimulatedRun,
    Summary,
    is_late,
    summarise,
)
from quire_cli.simulation.speed import Speed
from quire_cli.simulation.traces import Replay, Request, TraceError, read_trace, shaped
from quire_common.model_source import cache_home
from quire_common.quantities import parse_duration_seconds
from quire_operator.api import Spec
from quire_operator.api.fields import parse_time
from quire_operator.api.scaling import Autoscaling, AutoscalingMode, MetricsSource
from quire_operator.autoscaling.decision_context import Policy
from quire_operator.autoscaling.schedules import bounds_at
from quire_operator.capacity.fit import Fits

_WAKE_SECONDS = 1.0
_DAY_SECONDS = 86_400
_MOST_SECONDS = 366 * _DAY_SECONDS
"""The longest trace: its autoscaler evaluations alone take an hour."""
_MAX_FACTOR = 10_000
_POINTS = 600
"""The approximate number of points of the timeline."""

_of_engine = section("Engine", show_default=False)
_of_fleet = section("Replicas")
_of_trace = section("Trace")
_of_result = section("Result")


def _factor(least: float) -> dict[str, Any]:
    """Return the parser and the placeholder of an option whose value is a factor from ``least`` on."""

    def parse(text: str) -> float:
        try:
            factor = float(text)
        except ValueError:
            factor = 0.0
        if not least <= factor <= _MAX_FACTOR:  # nor is NaN
            raise typer.BadParameter(f'"{text}" is not a number from {least} to {_MAX_FACTOR}')
        return factor

    return {"parser": parse, "metavar": "FACTOR"}


def _date(text: str) -> float:
    """Parse a date and time with its offset to UTC."""
    seconds = parse_time(text)
    if seconds is None:
        raise typer.BadParameter(f'"{text}" is not a date and time with its offset such as 2026-03-02T07:30:00+01:00')
    return seconds


_FAULT = re.compile(r"(?P<kind>crash|outage|slow)@(?P<start>[^+x]+)(\+(?P<seconds>[^x]+))?(x(?P<factor>\d+(\.\d+)?))?")


def _fault(text: str) -> Fault:
    """Parse a fault: crash@10m, outage@10m+5m, slow@10m+5mx3."""
    found = _FAULT.fullmatch(text)
    start = parse_duration_seconds(found["start"]) if found else None
    lasts = parse_duration_seconds(found["seconds"]) if found and found["seconds"] else None
    factor = float(found["factor"] or 3.0) if found else 0.0
    if found is None or start is None or (found["seconds"] and lasts is None) or not factor:
        raise typer.BadParameter(f'"{text}" is not a fault such as crash@10m, outage@10m+5m or slow@10m+5mx3')
    match found["kind"]:
        case "crash":
            return Crash(time=start)
        case "outage":
            return ScrapeOutage(start=start, seconds=300.0 if lasts is None else lasts)
    return SlowReplicas(start=start, seconds=300.0 if lasts is None else lasts, factor=factor)


def simulate(
    trace: Annotated[Path, typer.Option(help="Azure LLM trace (CSV) or Mooncake trace (JSON lines).")],
    policy: Annotated[Path, typer.Option(help="A YAML file with an LLMDeployment that sets spec.autoscaling.")],
    name: Annotated[str | None, typer.Option(help="The LLMDeployment, if the file has several.")] = None,
    engine: Annotated[
        Path | None, _of_engine("A calibration file: JSON with prefill_tokens_per_second, step_seconds and so on.")
    ] = None,
    prefill_rate: Annotated[float | None, _of_engine("Prompt tokens per second of one engine.", min=0.1)] = None,
    step_time: Annotated[
        float | None, _of_engine("Time of a decode step without the time per sequence.", **DURATION)
    ] = None,
    decode_time: Annotated[
        float | None, _of_engine("Time that each sequence adds to a decode step.", **DURATION)
    ] = None,
    kv_tokens: Annotated[int | None, _of_engine("Size of one engine's KV cache, in tokens.", min=16)] = None,
    gpu: Annotated[str | None, _of_engine('Estimate the speed for this GPU, such as "H100 80GB".')] = None,
    startup_delay: Annotated[
        float, _of_fleet("Time from the request for a replica until it is ready.", **DURATION)
    ] = "120s",  # type: ignore[assignment]
    initial_replicas: Annotated[
        int | None, _of_fleet("Ready replicas at the start (default: from the spec).", min=0, show_default=False)
    ] = None,
    clock: Annotated[
        float | None,
        _of_fleet(
            "Date and time at the start, for autoscaling.schedules, such as 2026-03-02T07:30:00+01:00.",
            parser=_date,
            metavar="TIME",
            show_default=False,
        ),
    ] = None,
    fault: Annotated[
        list[str] | None,
        _of_fleet(
            "A fault: crash@10m, outage@10m+5m (no metrics) or slow@10m+5mx3. Repeatable.",
            metavar="FAULT",
            show_default=False,
        ),
    ] = None,
    seed: Annotated[int, _of_fleet("Seed of start-up delays and of ties in routing.")] = 0,
    speed_up: Annotated[
        float, _of_trace("Replay the trace faster by this factor.", names=("--speed",), **_factor(0.001))
    ] = 1.0,
    start: Annotated[float, _of_trace("Skip this much of the trace.", **DURATION)] = "0s",  # type: ignore[assignment]
    duration: Annotated[float | None, _of_trace("Use only this much of the trace.", **DURATION)] = None,
    scale_input: Annotated[float, _of_trace("Multiply prompt lengths.", **_factor(0.0001))] = 1.0,
    scale_output: Annotated[float, _of_trace("Multiply output lengths.", **_factor(0.0001))] = 1.0,
    max_input_tokens: Annotated[int | None, _of_trace("Truncate longer prompts.", min=1)] = None,
    max_output_tokens: Annotated[int | None, _of_trace("Limit longer outputs.", min=1)] = None,
    warm_up: Annotated[float, _of_trace("Time at the start that is not scored.", **DURATION)] = "0s",  # type: ignore[assignment]
    slo: Annotated[
        float,
        _of_result("A first token is late if it comes this long after the end of an immediate prefill.", **DURATION),
    ] = f"{LATE_SECONDS:g}s",  # type: ignore[assignment]
    decisions: Annotated[int, _of_result("Number of last decisions to show, with their reasons.", min=0)] = 10,
    json_file: Annotated[Path | None, _of_result("Write all results to this file.", names=("--json",))] = None,
    plot: Annotated[
        Path | None,
        _of_result("Plot arrivals, replicas, queue, KV cache usage and late requests to this .png, .svg or .pdf file."),
    ] = None,
) -> None:
    """Replay a trace against an autoscaling policy, in seconds and without an engine.

    Simulates the engines (queue, batches, KV blocks, start-up) under the trace. Routing and scaling are the code of the
    gateway and the operator. The speed of an engine comes, in this order, from the options, the --engine file,
    status.capacity in the policy file (kubectl get llmd chat -o yaml > chat.yaml), or an estimate from model and GPU.

    For example:

      quire simulate --trace azure_llm_2023_code.csv --policy chat.yaml --startup-delay 2m --plot out.png

      quire simulate --trace mooncake.jsonl --policy chat.yaml --prefill-rate 8000 --step-time 20ms
      --decode-time 0.2ms --kv-tokens 120000

      quire simulate --trace azure_llm_2023_code.csv --policy chat.yaml --fault outage@20m+5m --decisions 50
    """
    arguments = {key: str(value) for key, value in locals().items() if value is not None}
    if (problem := results_problem(json_file=json_file, plot=plot)) is not None:
        raise FileProblem(problem)
    faults = tuple(_fault(text) for text in fault or ())
    chosen = _choose(read_manifests(policy).documents, policy, name)
    replay = Replay(
        speed=speed_up,
        start_seconds=start,
        duration_seconds=duration,
        scale_input=scale_input,
        scale_output=scale_output,
        max_input_tokens=max_input_tokens,
        max_output_tokens=max_output_tokens,
    )
    requests = _requests(trace, replay)
    by_hand = Speed(
        prefill_tokens_per_second=prefill_rate,
        step_seconds=step_time,
        decode_seconds_per_sequence=decode_time,
        kv_tokens=kv_tokens,
    )
    known, source = _speed(chosen, policy, by_hand, engine, gpu)
    model = speed.engine_model(chosen.spec, known)
    last = requests[-1].time
    if warm_up >= last > 0:
        raise SimulationProblem(f"--warm-up leaves nothing to score: this part of the trace lasts {_clock(last)}")
    autoscaling = chosen.spec.autoscaling
    assert autoscaling is not None
    epoch = _epoch(autoscaling, clock, policy)
    scenario = Scenario(
        engine=model,
        startup_delay_seconds=startup_delay,
        min_replicas=autoscaling.fewest_replicas,
        max_replicas=autoscaling.most_replicas,
        initial_replicas=_initial_replicas(chosen.spec, autoscaling, initial_replicas, epoch, policy),
        drain_seconds=chosen.spec.drain.timeout_seconds,
        faults=faults,
        seed=seed,
        scored_from=warm_up,
        prefix_block_tokens=replay.prefix_block_tokens,
        wake_seconds=_WAKE_SECONDS if autoscaling.may_reach_zero else None,
        timeline_seconds=max(1.0, last / _POINTS),
    )
    console = plain_console()
    console.print(_assumptions(chosen.spec, known, source), highlight=False)
    run = _simulate(requests, scenario, _scaler(chosen.spec, epoch=epoch))
    summary = summarise(run, slo_seconds=slo)
    title = f"{chosen.spec.name} under {trace.name}"
    console.print(_render(summary, run, title=title, slo_seconds=slo, decisions=decisions))
    if json_file is not None:
        _write_json(json_file, arguments=arguments, engine=asdict(model), summary=summary, run=run)
    if plot is not None:
        _write_plot(plot, run, title=title, slo_seconds=slo)


def _choose(documents: tuple[Document, ...], policy: Path, name: str | None) -> Document:
    names = ", ".join(document.spec.name for document in documents)
    found = [document for document in documents if name in (None, document.spec.name)]
    if not found:
        raise SimulationProblem(f"{policy} has no LLMDeployment {name}", hint=f"it has: {names}")
    if len(found) > 1:
        raise SimulationProblem(f"{policy} has {len(found)} LLMDeployments: {names}", hint="select one with --name")
    if found[0].spec.autoscaling is None:
        raise SimulationProblem(
            f"{found[0].spec.name} in {policy} has no spec.autoscaling: it always has {found[0].spec.replicas}",
            hint="add for example   autoscaling: {minReplicas: 1, maxReplicas: 8}",
        )
    return found[0]


def _requests(trace: Path, replay: Replay) -> list[Request]:
    try:
        requests = shaped(read_trace(trace), replay)
    except OSError as error:
        raise FileProblem(
            f"the trace {trace} cannot be read: {error.strerror}",
            hint="--trace expects an Azure LLM inference trace (CSV) or a Mooncake trace (JSON lines)",
        ) from error
    except TraceError as error:
        raise FileProblem(f"{trace}: {error}") from error
    if not requests:
        raise FileProblem(f"{trace} has no requests in the range of --start and --duration")
    if requests[-1].time > _MOST_SECONDS:
        days, most = requests[-1].time / _DAY_SECONDS, _MOST_SECONDS // _DAY_SECONDS
        raise FileProblem(
            f"{trace} lasts {days:,.0f} days; at most {most} can be simulated",
            hint="check that its times are in milliseconds; --duration selects a part, --speed replays faster",
        )
    return requests


def _epoch(autoscaling: Autoscaling, clock: float | None, policy: Path) -> float:
    """Return the date and time of the trace's start, in Unix seconds; 0 if nothing depends on it."""
    if clock is None and autoscaling.schedules:
        raise SimulationProblem(
            f"{policy} has autoscaling.schedules, but the date and time of the trace's start are unknown",
            hint="add for example --clock 2026-03-02T07:30:00+01:00",
        )
    return clock or 0.0


def _initial_replicas(spec: Spec, autoscaling: Autoscaling, chosen: int | None, epoch: float, policy: Path) -> int:
    if chosen is None:
        return bounds_at(autoscaling, epoch, start_up_seconds=None).clamp(spec.initial_replicas)
    if chosen > autoscaling.most_replicas:
        raise SimulationProblem(
            f"--initial-replicas {chosen} is more than maxReplicas in {policy}: {autoscaling.most_replicas}"
        )
    return chosen


def _speed(
    chosen: Document, policy: Path, by_hand: Speed, calibration: Path | None, gpu: str | None
) -> tuple[Speed, str]:
    """Return the speed of an engine and its source."""
    known, sources = by_hand, ["the options"] if by_hand != Speed() else []
    if calibration is not None:
        known, sources = known.or_else(speed.read_calibration(calibration)), [*sources, str(calibration)]
    if not known.is_enough and gpu is None and (learned := speed.learned(chosen.status)) is not None:
        known, sources = known.or_else(learned), [*sources, f"status.capacity in {policy}"]
    if not known.is_enough:
        guess, label = _estimate(chosen.spec, policy, gpu)
        known, sources = known.or_else(guess), [*sources, f"an estimate for {label}, not measured"]
    return known, ", then ".join(sources)


def _estimate(spec: Spec, policy: Path, gpu: str | None) -> tuple[Speed, str]:
    """Return an estimate from the model's size, for the first hardware on which it fits."""
    machine = this_machine()
    hint = "or set the speed of an engine: --engine, or --prefill-rate, --step-time, --decode-time and --kv-tokens"
    try:
        store = ModelStore(base=policy.resolve().parent, cache=cache_home(os.environ))
        facts = store.facts(spec.model.source, weights_needed=False)
        where = planning.places(spec, (spec,), gpu=gpu, memory_bytes=None, machine=machine)
        found = planning.answers(spec, facts, where, machine=machine)
    except (ModelProblem, CapacityProblem) as error:
        raise SimulationProblem(
            f"the speed of an engine of {spec.name} is not known and cannot be estimated: {error.message}",
            details=error.details,
            hint=f"{error.hint}; {hint}" if error.hint else hint,
        ) from error
    for answer in found:
        if isinstance(answer.outcome, Fits):
            place = answer.place
            if place.on_gpu and place.gpu is None:
                raise SimulationProblem(f"the speed of a {place.label} is not known", hint=hint)
            hardware = speed.CPU if place.gpu is None else speed.GPUS[place.gpu.name].times(place.gpus)
            guess = speed.estimated(
                answer.needs,
                hardware,
                kv_tokens=answer.outcome.kv_tokens,
                max_model_length=facts.config.max_positions,
                stages=spec.parallelism.pipeline if place.on_gpu else 1,
            )
            return guess, place.label
    raise SimulationProblem(
        f"{spec.name} fits on no known device, so its speed cannot be estimated",
        hint=f"see quire plan -f {policy}; {hint}",
    )


def _scaler(spec: Spec, *, epoch: float) -> QuireScaler:
    """Return the operator's autoscaling policy. A policy that only recommends is simulated as if it were applied."""
    policy = Policy.of(spec)
    assert policy is not None
    rules = replace(policy.autoscaling, mode=AutoscalingMode.ENFORCE)
    by_prometheus = rules.metrics_source is MetricsSource.PROMETHEUS
    scrape_seconds = TICK_SECONDS if by_prometheus else 0.0
    return QuireScaler(replace(policy, autoscaling=rules), scrape_seconds=scrape_seconds, epoch=epoch)


def _simulate(requests: list[Request], scenario: Scenario, scaler: QuireScaler) -> SimulatedRun:
    columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.fields[clock]}"), TimeElapsedColumn())
    quiet = not sys.stderr.isatty()
    with Progress(*columns, console=Console(stderr=True), transient=True, disable=quiet) as progress:
        task = progress.add_task("simulating", total=requests[-1].time, clock="")
        return simulate_fleet(
            requests,
            scenario,
            scaler,
            progress=lambda now: progress.update(task, completed=now, clock=_clock(now)),
        )


def _assumptions(spec: Spec, known: Speed, source: str) -> str:
    recommends = spec.autoscaling is not None and spec.autoscaling.mode is AutoscalingMode.RECOMMEND
    mode = "\nThe mode is Recommend; the simulation applies every recommendation." if recommends else ""
    prefill, step, decode = known.prefill_tokens_per_second, known.step_seconds, known.decode_seconds_per_sequence
    assert prefill is not None and step is not None and decode is not None
    return (
        f"One engine: {prefill:,.0f} prompt tokens/s, {step * 1000:,.2f} ms per step + {decode * 1000:,.3f} ms per "
        f"sequence, {known.kv_tokens:,} KV tokens; source: {source}.{mode}"
    )


# --- the report ---


def _render(summary: Summary, run: SimulatedRun, *, title: str, slo_seconds: float, decisions: int) -> RenderableType:
    """Return the figures, the percentiles, and the last ``decisions`` changes with their reasons."""
    parts: list[RenderableType] = [_figures(summary, title, slo_seconds), Text(), _percentiles(summary)]
    changes = [decision for decision in run.decisions if decision.desired != decision.current]
    if decisions and changes:
        parts += [Text(), _changes(changes[-decisions:], len(changes))]
    elif decisions:
        parts += [Text(), Text(_why_none(run))]
    return Group(*parts)


def _figures(summary: Summary, title: str, slo_seconds: float) -> Table:
    table = Table(title=title, title_justify="left", show_header=False)
    table.add_column(style="bold", no_wrap=True)
    table.add_column()
    slo = f"first token at most {slo_seconds:g} s after the end of an immediate prefill"
    rows = [
        ("in time", f"{summary.attainment:.2%} of {summary.requests:,} requests: {slo}"),
        (
            "replica-hours",
            f"{summary.replica_hours:.2f} in {summary.hours:.2f} h: {summary.mean_replicas:.1f} replicas on average, "
            f"{summary.most_replicas} at most",
        ),
        ("changes", f"{summary.changes}, {summary.changes_per_hour:.1f} per hour"),
        ("worst queue", f"{summary.worst_queue:,} requests waiting"),
    ]
    if summary.failed:
        rows.append(
            (
                "failed",
                f"{summary.failed:,}: too long, rejected by full queues, held too long, or lost with their replica",
            )
        )
    if summary.unfinished:
        rows.append(("unfinished", f"{summary.unfinished:,} when the simulation ended"))
    if summary.preemptions:
        rows.append(("preemptions", f"{summary.preemptions:,}"))
    if summary.cached_share:
        rows.append(("prefix cache", f"{summary.cached_share:.1%} of the prompt tokens were cached"))
    for name, text in rows:
        table.add_row(name, text)
    return table


def _percentiles(summary: Summary) -> Table:
    table = Table()
    table.add_column("seconds")
    for column in ("mean", "p50", "p90", "p95", "p99", "max"):
        table.add_column(column, justify="right")
    table.add_row("time to first token", *_cells(summary.ttft_seconds))
    table.add_row("of it after an immediate prefill", *_cells(summary.wait_seconds))
    return table


def _cells(values: Distribution | None) -> list[str]:
    return ["–"] * 6 if values is None else [f"{value:,.2f}" for value in asdict(values).values()]


def _changes(changes: Sequence[DecisionPoint], total: int) -> Table:
    shown = f"last {len(changes)} of {total} changes" if len(changes) < total else f"all {total} changes"
    table = Table(title=shown, title_justify="left")
    table.add_column("at", justify="right", no_wrap=True)
    table.add_column("replicas", no_wrap=True)
    table.add_column("reason")
    for change in changes:
        table.add_row(_clock(change.time), f"{change.current} → {change.desired}", change.message)
    return table


def _why_none(run: SimulatedRun) -> str:
    last = run.decisions[-1] if run.decisions else None
    return "no change" if last is None else f"no change; at the end: {last.message}"


def _clock(seconds: float) -> str:
    """Return a time as 1:02:03 or 2:03."""
    minutes, second = divmod(round(seconds), 60)
    hours, minute = divmod(minutes, 60)
    return f"{hours}:{minute:02}:{second:02}" if hours else f"{minute}:{second:02}"


def _write_json(
    path: Path, *, arguments: Mapping[str, str], engine: Mapping[str, Any], summary: Summary, run: SimulatedRun
) -> None:
    """Write all results; times are seconds from the start of the used part of the trace.

    Prompts that cost nothing have an infinite speed, which JSON does not have: it is null.
    """
    document = {
        "arguments": arguments,
        "engine": engine,
        "summary": asdict(summary),
        "decisions": [asdict(decision) for decision in run.decisions],
        "timeline": [asdict(point) for point in run.timeline],
        "requests": [asdict(request) for request in run.requests],
    }
    path.write_text(json.dumps(_finite(document), allow_nan=False) + "\n", encoding="utf-8")


def _finite(value: object) -> object:
    """Return the value with None in place of infinity and NaN."""
    if isinstance(value, float):
        return value if isfinite(value) else None
    if isinstance(value, Mapping):
        return {key: _finite(item) for key, item in value.items()}
    return [_finite(item) for item in value] if isinstance(value, list | tuple) else value


def _write_plot(path: Path, run: SimulatedRun, *, title: str, slo_seconds: float) -> None:
    """Arrivals, replicas, queue, KV use and late requests over the same time."""
    from matplotlib.figure import Figure  # slow to import, and only this needs it

    figure = Figure(figsize=(11, 12), layout="constrained")
    load, count, queue, cache, late = figure.subplots(5, 1, sharex=True)
    figure.suptitle(title)
    times = [point.time for point in run.timeline]
    width = max(1.0, run.scored_until / 150)
    starts, arrived = _binned(run.requests, width, lambda request: True)
    _, slow = _binned(run.requests, width, lambda request: is_late(request, slo_seconds=slo_seconds))

    load.bar(starts, [number / width for number in arrived], width=width, align="edge", color="tab:gray")
    load.set(ylabel="arrivals per second")
    count.step(times, [point.asked for point in run.timeline], where="post", linestyle="--", label="asked for")
    count.step(times, [point.ready for point in run.timeline], where="post", label="ready")
    count.set(ylabel="replicas", ylim=(0, None))
    count.legend(loc="upper left")
    queue.plot(times, [point.waiting + point.held for point in run.timeline], label="waiting", color="tab:red")
    queue.plot(times, [point.running for point in run.timeline], label="running", alpha=0.6)
    queue.set(ylabel="requests", ylim=(0, None))
    queue.legend(loc="upper left")
    cache.plot(times, [point.kv_usage * 100 for point in run.timeline], color="tab:purple")
    cache.set(ylabel="KV cache in use (%)", ylim=(0, 100))
    share = [100 * number / total if total else 0.0 for number, total in zip(slow, arrived, strict=True)]
    late.bar(starts, share, width=width, align="edge", color="tab:orange")
    late.set(ylabel="late, of those that arrived (%)", ylim=(0, 100), xlabel="seconds")
    if run.scored_from > 0:
        for axes in (load, count, queue, cache, late):
            axes.axvspan(0, run.scored_from, color="black", alpha=0.06)
    figure.savefig(path, dpi=110)


def _binned(
    requests: Sequence[RequestResult], width: float, counts: Callable[[RequestResult], bool]
) -> tuple[list[float], list[int]]:
    bins = [0] * (int(max((request.arrival for request in requests), default=0.0) / width) + 1)
    for request in requests:
        bins[int(request.arrival / width)] += counts(request)
    return [place * width for place in range(len(bins))], bins
