"""The supervisor of the engine process: it starts it, detects when it ends or hangs, and replaces it.

The decisions (``RestartBudget``, ``SilenceWatch``) are plain values without a clock; ``Supervisor`` acts on them in the
API process's event loop. It does not know requests: ``Owner`` does.
"""

import asyncio
import contextlib
import logging
from collections import deque
from dataclasses import dataclass, field, replace
from time import monotonic
from typing import Literal, Protocol

from quire_engine.config import EngineConfig
from quire_engine.cpu.choice import CpuChoice
from quire_engine.cpu.limits import CpuLevel, CpuLimits
from quire_engine.errors import EngineStartError
from quire_engine.ipc.messages import (
    Connected,
    Failed,
    FromEngine,
    Ping,
    Ready,
    RunnerFactory,
    Shutdown,
    StepExpected,
    ToEngine,
    hang_limit,
)
from quire_engine.ipc.process import Ended, EngineProcess, Spawned, spawn

logger = logging.getLogger(__name__)

State = Literal["starting", "ready", "restarting", "failed", "stopped"]

_LAST_WORDS_SECONDS = 0.3


@dataclass(slots=True)
class RestartBudget:
    """The number of restarts of an engine before the restart of its pod is the better remedy."""

    delays: tuple[float, ...]
    window: float
    _past: deque[float] = field(default_factory=deque)

    def next_delay(self, now: float) -> float | None:
        """Return the seconds to wait before the restart that is due now; None after too many restarts."""
        while self._past and self._past[0] <= now - self.window:
            self._past.popleft()
        if len(self._past) == len(self.delays):
            return None
        self._past.append(now)
        return self.delays[len(self._past) - 1]


@dataclass(slots=True)
class SilenceWatch:
    """A count of checks without a message.

    It does not count seconds: if the API process itself was stopped for long, only one check is missed.
    """

    CHECKS = 10
    """The number of checks per hang timeout."""
    hang_timeout_seconds: float
    _silent: int = 0

    @property
    def interval_seconds(self) -> float:
        """The time between two checks."""
        return self.hang_timeout_seconds / self.CHECKS

    def check(self, *, heard: bool, expected_seconds: float = 0.0) -> bool:
        """Return whether no message arrived for the limit that applies to the current step."""
        self._silent = 0 if heard else self._silent + 1
        timeout = self.hang_timeout_seconds
        return self._silent >= self.CHECKS * (hang_limit(timeout, expected_seconds) / timeout)


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineLoss:
    """The unintended end of an engine process."""

    reason: str
    ended: Ended | None = None
    """None if the process did not end by itself."""


def level_after(loss: EngineLoss, limits: CpuLimits | None) -> CpuLevel | None:
    """Return the lower CPU level for the next engine process after an illegal instruction; None if the level stays."""
    refused = loss.ended is not None and loss.ended.illegal_instruction
    return limits.lower if refused and limits is not None else None


class Owner(Protocol):
    """The user of the engine."""

    def has_work(self) -> bool:
        """Return whether requests run, so that the engine sends messages without being pinged."""

    def receive(self, message: FromEngine) -> None: ...

    def engine_down(self, reason: str) -> None:
        """Fail all running requests."""


class Supervisor:
    def __init__(
        self,
        config: EngineConfig,
        factory: RunnerFactory,
        owner: Owner,
        spawned: Spawned | None = None,
        cpu: CpuChoice | None = None,
    ) -> None:
        """Create the supervisor.

        ``spawned`` is the first process if it was started before; ``cpu`` limits every process.
        """
        self._cpu = cpu
        self._config = config
        self._factory = factory
        self._options = options = config.engine_process
        self._owner = owner
        self._budget = RestartBudget(options.restart_delays_seconds, options.restart_window_seconds)
        self._spawned = spawned
        self._process: EngineProcess | None = None
        self._task: asyncio.Task[None] | None = None
        self._started: asyncio.Future[Ready] | None = None
        self._heard = False
        self._expected_seconds = 0.0
        """The expected time of the current step, if the engine process announced one."""
        self._lost_at: float | None = None
        """The time at which the last ready engine process was lost."""
        self._exit_code = 1
        self.state: State = "starting"
        self.ready: Ready | None = None
        self.restarts = 0
        self.failure: str | None = None
        """The reason for the state ``failed``."""

    @property
    def cpu(self) -> CpuLimits | None:
        """The CPU instructions that engine processes may use; None if they are unknown."""
        return None if self._cpu is None else self._cpu.limits

    async def start(self) -> Ready:
        """Return when the engine is ready for the first time. Raise EngineStartError if it fails."""
        assert self._task is None, "started twice"
        self._started = asyncio.get_running_loop().create_future()
        self._task = asyncio.create_task(self._run(self._started), name="engine supervisor")
        return await asyncio.shield(self._started)

    def send(self, message: ToEngine) -> None:
        assert self._process is not None and self.ready is not None
        self._process.send(message)

    async def close(self) -> None:
        """Send a shutdown to the engine process, end it, and release everything that belongs to it."""
        was_ready = self.state == "ready"
        self.state = "stopped"
        if self._task is not None:
            if was_ready:
                self.send(Shutdown())
                await asyncio.wait({self._task}, timeout=self._options.close_timeout_seconds)
            self._task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._task
        if self._started is not None and not self._started.done():
            self._started.set_exception(EngineStartError("stopped before the engine was ready"))
            self._started.exception()  # Mark the exception as retrieved, because the caller of start() may be gone.

    async def _run(self, started: "asyncio.Future[Ready]") -> None:
        try:
            await self._keep_alive(started)
        except Exception:  # A bug: without its supervisor, an engine is not reliable.
            logger.exception("the supervisor failed")
            self._fail("the supervisor of the engine process failed; see its log")
            self.ready = None
            self._owner.engine_down("its supervisor failed")
            if not started.done():
                started.set_exception(EngineStartError("the supervisor failed"))

    async def _keep_alive(self, started: "asyncio.Future[Ready]") -> None:
        while True:
            loss = await self._live(started)
            reason = loss.reason
            if self._stopped():
                return
            self.ready = None
            if self._steps_down(loss) and not started.done():
                continue  # There are few levels, so this ends.
            if not started.done():
                self._fail(reason)
                started.set_exception(EngineStartError(reason, self._exit_code))
                started.exception()
                return
            self.state = "restarting"
            self._owner.engine_down(reason)
            if self._lost_for() >= self._options.start_timeout_seconds:
                self._fail(reason)
                return
            delay = self._budget.next_delay(monotonic())
            if delay is None:
                count, window = len(self._options.restart_delays_seconds), self._options.restart_window_seconds
                self._fail(f"{reason}; it was restarted {count} times within {window:g} s, which is enough")
                return
            self.restarts += 1
            logger.warning("%s; starting it again%s", reason, f" in {delay:g} s" if delay else "")
            await asyncio.sleep(delay)

    def _steps_down(self, loss: EngineLoss) -> bool:
        """Go one CPU level lower if the loss requires it, log that, and return whether it was done."""
        lower = level_after(loss, self.cpu)
        if self._cpu is None or lower is None:
            return False
        logger.warning("%s; the CPU is used at level %s from now on, and at later starts", loss.reason, lower)
        self._cpu.step_down()
        logger.info("CPU: %s", self._cpu.limits.sentence)
        return True

    def _lost(self) -> None:
        """Record that the process is lost: nothing is sent to it any more."""
        if self.state == "ready":
            self.state = "restarting"
            self._lost_at = monotonic()
        self.ready = None

    def _lost_for(self) -> float:
        """Return how long there has been no engine since one was lost."""
        return 0.0 if self._lost_at is None or self.ready is not None else monotonic() - self._lost_at

    def _stopped(self) -> bool:
        return self.state == "stopped"

    def _fail(self, reason: str) -> None:
        self.state = "failed"
        self.failure = reason
        logger.error("%s", reason)

    async def _live(self, started: "asyncio.Future[Ready]") -> EngineLoss:
        """Follow one engine process from its start to its end, and return why it ended."""
        try:
            spawned = self._spawned or spawn(replace(self._config, cpu=self.cpu), self._factory)
        except OSError as error:
            return EngineLoss(reason=f"the engine process cannot be started: {error}")
        self._spawned = None
        process = self._process = EngineProcess(spawned)
        ready = asyncio.Event()
        listening = asyncio.create_task(self._listen(process, started, ready))
        ending = asyncio.create_task(process.ended())
        watching = asyncio.create_task(self._watch(ready))
        tasks = {listening, ending, watching}
        try:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            self._lost()
            if done == {ending}:
                # The process may have sent the reason just before it ended.
                await asyncio.wait({listening}, timeout=_LAST_WORDS_SECONDS)
            ended = ending.result() if ending.done() else None
            said = next((task.result() for task in (listening, watching) if task.done()), None)
            return EngineLoss(reason=said or (await ending).reason, ended=ended)
        except Exception:
            logger.exception("watching the engine process failed")
            return EngineLoss(reason="watching the engine process failed")
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await process.end()

    async def _listen(self, process: EngineProcess, started: "asyncio.Future[Ready]", ready: asyncio.Event) -> str:
        """Handle the engine's messages until it reports a failure, and return the reason."""
        while True:
            message = await process.receive()
            self._heard = True
            if isinstance(message, Failed):
                self._exit_code = message.exit_code
                return message.message
            if isinstance(message, StepExpected):
                self._expected_seconds = message.seconds
            if isinstance(message, Connected):
                process.unlink()
            if isinstance(message, Ready):
                ready.set()
                if not self._stopped():
                    self.ready, self.state = message, "ready"
                if not started.done():
                    started.set_result(message)
            self._owner.receive(message)

    async def _watch(self, ready: asyncio.Event) -> str:
        """Return the reason when the engine has been silent for too long."""
        limit = self._options.start_timeout_seconds
        try:
            await asyncio.wait_for(ready.wait(), timeout=limit - self._lost_for())
        except TimeoutError:
            return f"the engine process did not get ready within {limit:g} s"
        limit = self._options.hang_timeout_seconds
        self._expected_seconds = 0.0
        watch = SilenceWatch(limit)
        while not watch.check(heard=self._heard, expected_seconds=self._expected_seconds):
            self._heard = False
            if not self._owner.has_work() and not self._stopped():
                self.send(Ping())
            await asyncio.sleep(watch.interval_seconds)
        doing = "made no step" if self._owner.has_work() else "gave no answer"
        return f"the engine process {doing} for {hang_limit(limit, self._expected_seconds):g} s"
