"""One server's turn: it is started alone, warmed up, measured, and stopped."""

import asyncio
import json
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from subprocess import CalledProcessError

import aiohttp

from benchmarks.serving.comparison.client import Summary, Workload, requests_of, rounds_for, run, summarise
from benchmarks.serving.comparison.process_tree import ProcessTree, ServerError, free_port, running
from benchmarks.serving.comparison.results import Measured, Turn
from benchmarks.serving.comparison.servers import Launch, ServerUnderTest, Setting
from quire_engine.cpu.limits import CpuLevel

_START_SECONDS, _POLL_SECONDS = 900.0, 0.1
_WARM_UP_SEED = 1_000_000

Say = Callable[[str], None]


class Bench:
    """The settings that all turns share: the model, the level of CPU, the measurement time, the folder of logs."""

    def __init__(
        self,
        *,
        model: Path,
        cpu_level: CpuLevel,
        workloads: Sequence[Workload],
        seconds: float,
        logs: Path,
        say: Say,
    ) -> None:
        self.model = model
        self.cpu_level = cpu_level
        self.workloads = tuple(workloads)
        self.seconds = seconds
        self.logs = logs
        self.say = say
        config = json.loads((model / "config.json").read_text(encoding="utf-8"))
        self.vocabulary = int(config["vocab_size"])

    def turn(self, server: ServerUnderTest, run: int) -> Turn:
        """Return the result of a turn; a peer's problem is part of the result and never raised."""
        starts: list[float] = []
        peaks: list[int] = []
        measured: list[Measured] = []
        problem = None
        try:
            setting = Setting(
                model=self.model, port=free_port(), cpu_level=self.cpu_level, workloads=self.workloads, say=self.say
            )
            for launch in server.launches(setting):
                self._served(server, launch, setting, run, starts, peaks, measured)
        except ServerError as error:
            problem = str(error)
        except CalledProcessError as error:
            problem = f"{error.cmd[0]} ended with {error.returncode}: {(error.stderr or '')[-2000:]}"
        except OSError as error:
            problem = str(error)
        return Turn(
            server=server.name,
            family=server.family,
            run=run,
            start_seconds=min(starts) if starts else None,
            peak_rss_bytes=max(peaks) if peaks else None,
            measured=tuple(measured),
            problem=problem,
        )

    def _served(
        self,
        server: ServerUnderTest,
        launch: Launch,
        setting: Setting,
        run: int,
        starts: list[float],
        peaks: list[int],
        measured: list[Measured],
    ) -> None:
        log = self.logs / f"{server.name}-run{run}.log"
        with running(launch.command, launch.environment, log) as tree:
            start_seconds, round_seconds = asyncio.run(self._warm_up(server, launch, setting, tree))
            starts.append(start_seconds)
            for workload in launch.workloads:
                rounds = rounds_for(self.seconds, round_seconds[workload])
                summary = asyncio.run(self._run(_base_url(launch, setting), workload, rounds=rounds, seed=run))
                measured.append(measured_from(workload, summary))
                self.say(f"{server.name}: {workload}  {in_words(measured[-1])}")
            peaks.append(tree.peak_rss_bytes)

    async def _warm_up(
        self, server: ServerUnderTest, launch: Launch, setting: Setting, tree: ProcessTree
    ) -> tuple[float, dict[Workload, float]]:
        """Wait for the first token, and run a round of each workload. Return the seconds of both."""
        base_url = _base_url(launch, setting)
        start_seconds = await seconds_to_first_token(tree, base_url)
        self.say(f"{server.name}: first token {start_seconds:.1f} s after its start")
        round_seconds = {}
        for workload in launch.workloads:
            summary = await self._run(base_url, workload, rounds=1, seed=_WARM_UP_SEED)
            round_seconds[workload] = summary.seconds
        return start_seconds, round_seconds

    async def _run(self, base_url: str, workload: Workload, *, rounds: int, seed: int) -> Summary:
        requests = requests_of(workload, rounds=rounds, vocabulary=self.vocabulary, seed=seed)
        summary = summarise(await run(base_url, requests, concurrency=workload.concurrency))
        check(summary, workload, len(requests))
        return summary


def _base_url(launch: Launch, setting: Setting) -> str:
    return f"http://127.0.0.1:{launch.port or setting.port}/v1"


async def seconds_to_first_token(tree: ProcessTree, base_url: str) -> float:
    """Return the seconds since the start of the command.

    It polls like a readiness probe; one token is the proof.
    """
    body = {"model": "model", "prompt": [1, 2, 3], "max_tokens": 1, "temperature": 0.0}
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=_START_SECONDS)) as session:
        while time.perf_counter() - tree.began < _START_SECONDS:
            tree.check()
            try:
                async with session.post(f"{base_url}/completions", json=body) as response:
                    if response.status == 200:
                        await response.read()
                        return time.perf_counter() - tree.began
                    if response.status < 500:
                        raise ServerError(f"it answered {response.status}: {(await response.text())[:300]}; {tree.log}")
            except (aiohttp.ClientError, TimeoutError):
                pass
            await asyncio.sleep(_POLL_SECONDS)
    raise ServerError(f"no first token within {_START_SECONDS:.0f} s; its log: {tree.log}")


def check(summary: Summary, workload: Workload, requests: int) -> None:
    """Raise ServerError unless the answers have the requested length, for prompts of the length sent."""
    if summary.errors:
        message, count = next(iter(summary.errors.items()))
        raise ServerError(f"{workload}: {count} of {requests} requests failed: {message}")
    if summary.short:
        raise ServerError(f"{workload}: {summary.short} of {requests} answers were shorter than asked for")
    if summary.prompt_tokens != requests * workload.input_tokens:
        sent, counted = requests * workload.input_tokens, summary.prompt_tokens
        raise ServerError(f"{workload}: the server counted {counted} prompt tokens where {sent} were sent")


def measured_from(workload: Workload, summary: Summary) -> Measured:
    return Measured(
        workload=workload,
        requests=summary.requests,
        seconds=summary.seconds,
        total_tokens_per_second=(summary.prompt_tokens + summary.output_tokens) / summary.seconds,
        output_tokens_per_second=summary.output_tokens / summary.seconds,
        ttft_p50_seconds=summary.ttft_p50,
        itl_p50_seconds=summary.itl_p50,
        tpot_p50_seconds=summary.tpot_p50,
    )


def in_words(measured: Measured) -> str:
    words = f"{measured.total_tokens_per_second:,.0f} tokens/s"
    if measured.ttft_p50_seconds is not None and measured.itl_p50_seconds is not None:
        words += f", TTFT {measured.ttft_p50_seconds * 1e3:,.0f} ms, ITL {measured.itl_p50_seconds * 1e3:,.1f} ms"
    return words
