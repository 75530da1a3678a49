"""``quire bench``: the command line of the load generator."""

import asyncio
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from enum import StrEnum
from pathlib import Path
from typing import Annotated, NoReturn

import aiohttp
import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from quire_cli.bench import client, report
from quire_cli.bench.options import (
    DURATION,
    URL,
    DurationOption,
    MaxInputOption,
    MaxOutputOption,
    ScaleInputOption,
    ScaleOutputOption,
    SpeedOption,
    StartOption,
    of_result,
    of_trace,
    section,
)
from quire_cli.bench.summary import BenchSummary, MeasuredRequest, Objective, summarise
from quire_cli.bench.traces import Replay, TraceError, read_trace, replayed
from quire_cli.bench.workload import Alphabet, Conversation, Shape, synthetic
from quire_cli.result_files import results_problem


class Endpoint(StrEnum):
    """The route that requests use."""

    completions = "completions"
    chat = "chat"


@dataclass(frozen=True, slots=True)
class TokenRange:
    first: int
    last: int


def _token_ids(text: str) -> TokenRange:
    first, _, last = text.partition(":")
    if not (first.isdecimal() and last.isdecimal() and int(first) <= int(last)):
        raise typer.BadParameter(f"{text!r} is not a range of token ids; expected for example 300:2000")
    return TokenRange(int(first), int(last))


_of_load = section("Load")
_of_length = section("Lengths")


def bench(
    base_url: Annotated[
        str, typer.Option(help="Base URL of an OpenAI-compatible server.", **URL)
    ] = "http://127.0.0.1:8000/v1",
    model: Annotated[str | None, typer.Option(help="The model (default: the only one that is served).")] = None,
    endpoint: Annotated[
        Endpoint, typer.Option(help="completions sends token ids, chat sends text.")
    ] = Endpoint.completions,
    api_key: Annotated[
        str | None, typer.Option(envvar="OPENAI_API_KEY", help="API key, sent as a bearer token.")
    ] = None,
    requests: Annotated[int, _of_load("Number of conversations.", min=1)] = 100,
    concurrency: Annotated[
        int | None, _of_load("Closed loop: number of concurrent conversations (default: 8 without --rate).", min=1)
    ] = None,
    rate: Annotated[
        float | None,
        _of_load("Open loop: conversations that start per second, whether or not others are answered.", min=0.001),
    ] = None,
    burstiness: Annotated[
        float, _of_load("With --rate: 1 is a Poisson process, lower values are burstier.", min=0.01)
    ] = 1.0,
    turns: Annotated[int, _of_load("Turns per conversation; each turn contains the previous ones.", min=1)] = 1,
    warmup: Annotated[int, _of_load("Number of warm-up requests, which are not counted.", min=0)] = 1,
    timeout: Annotated[float, _of_load("Timeout of one answer.", **DURATION)] = "10m",  # type: ignore[assignment]
    seed: Annotated[int, _of_load("Seed of the workload.")] = 0,
    temperature: Annotated[float, _of_load("Sampling temperature; 0 is greedy.", min=0.0)] = 0.0,
    ignore_eos: Annotated[
        bool, _of_load("Request exactly the output length (an extension that most servers support).")
    ] = True,
    input_tokens: Annotated[int, _of_length("Mean prompt length, in tokens.", min=1)] = 256,
    output_tokens: Annotated[int, _of_length("Mean output length, in tokens.", min=1)] = 64,
    jitter: Annotated[float, _of_length("Lengths vary by up to this share of the mean.", min=0.0, max=1.0)] = 0.0,
    prefix_tokens: Annotated[int, _of_length("Length of a shared prefix of all prompts, in tokens.", min=0)] = 0,
    prefix_groups: Annotated[int, _of_length("Number of different shared prefixes.", min=1)] = 1,
    token_ids: Annotated[
        TokenRange, _of_length("The range of token ids in prompts.", parser=_token_ids, metavar="FIRST:LAST")
    ] = "300:2000",  # type: ignore[assignment]
    trace: Annotated[
        Path | None,
        of_trace("Azure LLM trace (CSV) or Mooncake trace (JSON lines), which sets arrivals and lengths."),
    ] = None,
    speed: SpeedOption = 1.0,
    start: StartOption = "0s",  # type: ignore[assignment]
    duration: DurationOption = None,
    scale_input: ScaleInputOption = 1.0,
    scale_output: ScaleOutputOption = 1.0,
    max_input_tokens: MaxInputOption = None,
    max_output_tokens: MaxOutputOption = None,
    slo_ttft: Annotated[float | None, of_result("Goodput: maximum time to first token.", **DURATION)] = None,
    slo_tpot: Annotated[float | None, of_result("Goodput: maximum time per output token.", **DURATION)] = None,
    slo_e2e: Annotated[float | None, of_result("Goodput: maximum end-to-end latency.", **DURATION)] = None,
    json_file: Annotated[Path | None, of_result("Write all measurements to this file.", names=("--json",))] = None,
    plot: Annotated[Path | None, of_result("Plot load and latencies to this .png, .svg or .pdf file.")] = None,
) -> None:
    """Measure any OpenAI-compatible server: latencies, throughput, goodput, errors.

    For example:

      quire bench --concurrency 16 --input-tokens 256 --output-tokens 64

      quire bench --rate 4 --requests 200 --prefix-tokens 500 --slo-ttft 1s --plot out.png

      quire bench --trace azure_llm_2023_code.csv --duration 10m --scale-input 0.1

    Exits with 1 if a request failed.
    """
    arguments = {name: str(value) for name, value in locals().items() if name != "api_key" and value is not None}
    if (problem := results_problem(json_file=json_file, plot=plot)) is not None:
        _fail(problem)
    alphabet = Alphabet(first_token_id=token_ids.first, last_token_id=token_ids.last, words=endpoint is Endpoint.chat)
    if trace is not None:
        window = Replay(
            speed=speed,
            start_seconds=start,
            duration_seconds=duration,
            scale_input=scale_input,
            scale_output=scale_output,
            max_input_tokens=max_input_tokens,
            max_output_tokens=max_output_tokens,
        )
        workload = _from_trace(trace, window, alphabet, seed)
    else:
        shape = Shape(
            input_tokens=input_tokens,
            output_tokens=output_tokens,
            jitter=jitter,
            prefix_tokens=prefix_tokens,
            prefix_groups=prefix_groups,
            turns=turns,
        )
        workload = synthetic(shape, alphabet, count=requests, rate=rate, burstiness=burstiness, seed=seed)
    if concurrency is None and rate is None and trace is None:
        concurrency = 8
    target = client.Target(
        base_url=base_url.rstrip("/"),
        model=model or "",
        endpoint=endpoint.value,
        api_key=api_key,
        ignore_eos=ignore_eos,
        temperature=temperature,
        timeout_seconds=timeout,
    )
    run = _run(target, workload, concurrency, warmup)
    summary = summarise(run.outcomes, Objective(ttft_seconds=slo_ttft, tpot_seconds=slo_tpot, e2e_seconds=slo_e2e))
    _report(run, summary, arguments=arguments, json_file=json_file, plot=plot)
    if summary.errors:
        raise typer.Exit(1)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Run:
    """The measured part of a run. ``target`` has the name of the model."""

    target: client.Target
    started_at: datetime
    outcomes: list[MeasuredRequest]


def _run(target: client.Target, workload: Sequence[Conversation], concurrency: int | None, warmup: int) -> _Run:
    try:
        return asyncio.run(_measure(target, workload, concurrency, warmup, Console(stderr=True)))
    except KeyboardInterrupt:
        _fail("interrupted; there is no report", code=130)


def _report(
    run: _Run, summary: BenchSummary, *, arguments: dict[str, str], json_file: Path | None, plot: Path | None
) -> None:
    """Print the summary, and write the files that were requested."""
    title = f"{run.target.model} at {run.target.base_url}"
    output = Console()
    output.print(report.table(summary, title))
    for line in report.lines(summary):
        output.print(line, highlight=False)
    if json_file is not None:
        report.write_json(json_file, arguments, run.started_at, summary, run.outcomes)
    if plot is not None:
        report.write_plot(plot, title, run.outcomes)


def _from_trace(path: Path, window: Replay, alphabet: Alphabet, seed: int) -> list[Conversation]:
    try:
        workload = replayed(read_trace(path), window, alphabet, seed=seed)
    except OSError as error:
        _fail(f"cannot read the trace {path}: {error.strerror}")
    except TraceError as error:
        _fail(f"{path}: {error}")
    if not workload:
        _fail("the trace has no requests in the range of --start and --duration")
    return workload


async def _measure(
    target: client.Target, workload: Sequence[Conversation], concurrency: int | None, warmup: int, console: Console
) -> _Run:
    async with client.open_session(target.api_key) as session:
        target = await _with_model(session, target)
        ignored = [replace(conversation, arrival_seconds=0.0) for conversation in workload[:warmup]]
        await client.run(session, target, ignored, concurrency=1, on_sent=lambda: None, on_done=lambda _: None)
        columns = (
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("{task.fields[under_way]} running, {task.fields[failed]} failed"),
        )
        with Progress(*columns, console=console, transient=True, disable=not sys.stderr.isatty()) as progress:
            total = sum(len(conversation.turns) for conversation in workload)
            task = progress.add_task("measuring", total=total, under_way=0, failed=0)
            counts = {"sent": 0, "done": 0, "failed": 0}

            def show() -> None:
                progress.update(
                    task, completed=counts["done"], under_way=counts["sent"] - counts["done"], failed=counts["failed"]
                )

            def sent() -> None:
                counts["sent"] += 1
                show()

            def done(outcome: MeasuredRequest) -> None:
                counts["done"] += 1
                counts["failed"] += outcome.error is not None
                show()

            started_at = datetime.now(UTC)
            outcomes = await client.run(session, target, workload, concurrency=concurrency, on_sent=sent, on_done=done)
    return _Run(target=target, started_at=started_at, outcomes=outcomes)


async def _with_model(session: aiohttp.ClientSession, target: client.Target) -> client.Target:
    """Return the target with the model's name, after the server has answered."""
    try:
        models = await client.discover_model(session, target.base_url)
    except client.UnexpectedAnswer as error:
        _fail(f"{target.base_url}/models answered {error}")
    except (aiohttp.ClientError, TimeoutError, ValueError, KeyError, TypeError) as error:
        _fail(f"no OpenAI-compatible server answers at {target.base_url}: {str(error) or type(error).__name__}")
    if target.model and target.model not in models:
        _fail(f"{target.base_url} does not serve {target.model!r}; it serves: {', '.join(models) or 'none'}")
    if not target.model and len(models) != 1:
        _fail(f"set --model: {target.base_url} serves {', '.join(models) or 'no model'}")
    return replace(target, model=target.model or models[0])


def _fail(message: str, code: int = 2) -> NoReturn:
    typer.echo(f"quire bench: {message}", err=True)
    raise typer.Exit(code)
