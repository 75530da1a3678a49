"""One server's turn: it is started alone, warmed up, measured, and stopped."""

import asyncio
import contextlib
import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from subprocess import CalledProcessError

import aiohttp

from benchmarks.serving.comparison.client import Summary, run, summarise
from benchmarks.serving.comparison.levels import library_variables
from benchmarks.serving.comparison.process_tree import ProcessTree, ServerError, free_port, running
from benchmarks.serving.comparison.results import Measured, Turn
from benchmarks.serving.comparison.servers import Launch, ServerUnderTest, Setting, batch_command
from benchmarks.serving.comparison.workloads import Workload, requests_of, rounds_for
from quire_engine.cpu.limits import CpuLevel

_START_SECONDS, _POLL_SECONDS, _BATCH_SECONDS = 900.0, 0.1, 1800.0
_WARM_UP_SEED = 1_000_000

Say = Callable[[str], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Warm:
    """A server that has answered every workload once."""

    start_seconds: float
    round_seconds: Mapping[Workload, float]


class Bench:
    """The settings that all turns share: the model, the level of CPU, the measurement time, the folder of logs.

    With ``keep_running`` every server is started once and paused between its turns, until ``close``.
    """

    def __init__(
        self,
        *,
        model: Path,
        cpu_level: CpuLevel,
        workloads: Sequence[Workload],
        seconds: float,
        logs: Path,
        say: Say,
        keep_running: bool = False,
    ) -> None:
        self.model = model
        self.cpu_level = cpu_level
        self._keep_running = keep_running
        self._launches: dict[str, tuple[Setting, list[Launch]]] = {}
        self._running: dict[tuple[str, ...], ProcessTree] = {}
        self._warm: dict[tuple[str, ...], _Warm] = {}
        self._stack = contextlib.ExitStack()
        self.workloads = tuple(workloads)
        self.seconds = seconds
        self.logs = logs
        self.say = say
        config = json.loads((model / "config.json").read_text(encoding="utf-8"))
        self.vocabulary = int(config["vocab_size"])

    def close(self) -> None:
        """Stop the servers that were kept running."""
        self._stack.close()

    def start(self, server: ServerUnderTest) -> None:
        """Start a server that is kept running and warm it up, so that all runs are close in time.

        A server that does not start is tried again in its turn, which reports the problem.
        """
        if server.launches is None:
            return
        with contextlib.suppress(ServerError, CalledProcessError, OSError):
            setting, launches = self._prepare(server)
            for launch in launches:
                with self._started(launch, self.logs / f"{server.name}.log") as tree:
                    asyncio.run(self._warm_up(server, launch, setting, tree))

    def turn(self, server: ServerUnderTest, run: int) -> Turn:
        """Return the result of a turn; a peer's problem is part of the result and never raised."""
        starts: list[float] = []
        peaks: list[int] = []
        measured: list[Measured] = []
        problem = None
        try:
            if server.batches is not None:
                self._batches(server, server.batches, run, peaks, measured)
            else:
                assert server.launches is not None
                setting, launches = self._prepare(server)
                for launch in launches:
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

    def _prepare(self, server: ServerUnderTest) -> tuple[Setting, list[Launch]]:
        """Return the starts of a server: the same in every run if it is kept running."""
        if server.name not in self._launches or not self._keep_running:
            assert server.launches is not None
            setting = Setting(
                model=self.model, port=free_port(), cpu_level=self.cpu_level, workloads=self.workloads, say=self.say
            )
            self._launches[server.name] = (setting, server.launches(setting))
        return self._launches[server.name]

    @contextlib.contextmanager
    def _started(self, launch: Launch, log: Path) -> Iterator[ProcessTree]:
        """Start the server, or resume it, and stop or pause it at the end."""
        if not self._keep_running:
            with running(launch.command, launch.environment, log) as tree:
                yield tree
            return
        if launch.command not in self._running:
            started = running(launch.command, launch.environment, log)
            self._running[launch.command] = self._stack.enter_context(started)
        tree = self._running[launch.command]
        tree.resume()
        try:
            yield tree
        finally:
            tree.pause()

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
        with self._started(launch, log) as tree:
            warm = self._warm.get(launch.command) if self._keep_running else None
            warm = warm or asyncio.run(self._warm_up(server, launch, setting, tree))
            starts.append(warm.start_seconds)
            for workload in launch.workloads:
                rounds = rounds_for(self.seconds, warm.round_seconds[workload])
                summary = asyncio.run(self._run(_base_url(launch, setting), workload, rounds=rounds, seed=run))
                measured.append(measured_from(workload, summary))
                self.say(f"{server.name}: {workload}  {in_words(measured[-1])}")
            peaks.append(tree.peak_rss_bytes)

    async def _warm_up(self, server: ServerUnderTest, launch: Launch, setting: Setting, tree: ProcessTree) -> _Warm:
        """Wait for the first token, and run a round of each workload, whose time determines how many to measure."""
        base_url = _base_url(launch, setting)
        start_seconds = await seconds_to_first_token(tree, base_url)
        self.say(f"{server.name}: first token {start_seconds:.1f} s after its start")
        round_seconds = {}
        for workload in launch.workloads:
            summary = await self._run(base_url, workload, rounds=1, seed=_WARM_UP_SEED)
            round_seconds[workload] = summary.seconds
        self._warm[launch.command] = _Warm(start_seconds=start_seconds, round_seconds=round_seconds)
        return self._warm[launch.command]

    async def _run(self, base_url: str, workload: Workload, *, rounds: int, seed: int) -> Summary:
        requests = requests_of(workload, rounds=rounds, vocabulary=self.vocabulary, seed=seed)
        summary = summarise(await run(base_url, requests, concurrency=workload.concurrency))
        check(summary, workload, len(requests))
        return summary

    def _batches(
        self, server: ServerUnderTest, mode: str, run: int, peaks: list[int], measured: list[Measured]
    ) -> None:
        """Measure the tokens over the time of one round; without a server there is no latency."""
        prompts, results = (self.logs / f"{server.name}-{what}.json" for what in ("prompts", "results"))
        asked = {str(workload): self._round(workload, run) for workload in self.workloads}
        prompts.write_text(json.dumps(asked), encoding="utf-8")
        results.unlink(missing_ok=True)
        command = batch_command(mode, self.model, prompts, results)
        environment = {"HF_HUB_OFFLINE": "1", **library_variables(self.cpu_level)}
        with running(command, environment, self.logs / f"{server.name}-run{run}.log") as tree:
            if tree.wait(_BATCH_SECONDS) != 0 or not results.exists():
                tree.check()
            peaks.append(tree.peak_rss_bytes)
        seconds = json.loads(results.read_text(encoding="utf-8"))
        for workload in self.workloads:
            measured.append(batch_measured(workload, seconds[str(workload)]))
            self.say(f"{server.name}: {workload}  {in_words(measured[-1])}")

    def _round(self, workload: Workload, run: int) -> dict[str, object]:
        requests = requests_of(workload, rounds=1, vocabulary=self.vocabulary, seed=run)
        return {"prompts": [request.prompt for request in requests], "output_tokens": workload.output_tokens}


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


def batch_measured(workload: Workload, seconds: float) -> Measured:
    return Measured(
        workload=workload,
        requests=workload.concurrency,
        seconds=seconds,
        total_tokens_per_second=workload.round_tokens / seconds,
        output_tokens_per_second=workload.concurrency * workload.output_tokens / seconds,
    )


def in_words(measured: Measured) -> str:
    words = f"{measured.total_tokens_per_second:,.0f} tokens/s"
    if measured.ttft_p50_seconds is not None and measured.itl_p50_seconds is not None:
        words += f", TTFT {measured.ttft_p50_seconds * 1e3:,.0f} ms, ITL {measured.itl_p50_seconds * 1e3:,.1f} ms"
    return words
