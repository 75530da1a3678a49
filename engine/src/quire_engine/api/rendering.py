"""The worker processes that render conversations, and the order in which conversations get one.

A chat template is a program whose cost a client's messages decide, so that it runs in a process of its own.
"""

import asyncio
import contextlib
import heapq
from dataclasses import dataclass
from itertools import count
from typing import Protocol

import msgspec

from quire_engine.api.rendering_worker import Conversation, Rendered, TemplateSetup, too_slow
from quire_engine.api.worker_process import WorkerFailed, WorkerProcess, WorkerTooSlow, frame
from quire_engine.errors import InvalidRequest, Unavailable
from quire_engine.text.chat_template import ChatTemplate

_WORKER = "quire_engine.api.rendering_worker"
_RETRY_SECONDS = 2
_SHORT_WEIGHT = 128
"""The weight of a short conversation: a quadratic template takes milliseconds for so many messages."""
_BYTES_PER_WEIGHT = 1024


class Renderer(Protocol):
    """The chat template of a model, wherever it runs."""

    async def render(self, conversation: Conversation) -> str:
        """Return the prompt of a conversation. Raises InvalidRequest, Unavailable."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RenderLimits:
    """The bounds of the workers."""

    workers: int = 2
    """The number of processes; they start when they are needed. One serves short conversations only."""
    cpu_seconds: float = 3.0
    """The processor time that one conversation may take."""
    wall_seconds: float = 30.0
    """A worker that does not answer for this time is killed: it is stopped, or in code that no signal interrupts."""
    memory_bytes: int = 2**30
    max_waiting: int = 256
    """The most conversations that wait for a worker."""
    wait_seconds: float = 30.0
    """The longest wait of a conversation for a worker."""


class RenderPool:
    """A Renderer in worker processes. ``close`` ends them."""

    def __init__(self, template: ChatTemplate, limits: RenderLimits | None = None) -> None:
        self._limits = limits or RenderLimits()
        assert self._limits.workers >= 2, "one worker is for short conversations only"
        setup = TemplateSetup(
            source=template.source,
            variables=dict(template.variables),
            cpu_seconds=self._limits.cpu_seconds,
            memory_bytes=self._limits.memory_bytes,
        )
        self._for_short = _Worker(setup, self._limits)
        self._idle = [self._for_short, *(_Worker(setup, self._limits) for _ in range(1, self._limits.workers))]
        self._workers = tuple(self._idle)
        self._waiting: list[tuple[int, int, asyncio.Future[_Worker]]] = []
        self._order = count()

    async def start(self) -> None:
        """Render a conversation, so that the first request does not wait for a process and its first use."""
        with contextlib.suppress(InvalidRequest, Unavailable):
            await self.render(Conversation(messages=[{"role": "user", "content": "Hi"}]))

    async def close(self) -> None:
        """End all workers."""
        for worker in self._workers:
            await worker.end()

    async def render(self, conversation: Conversation) -> str:
        """Return the prompt of a conversation. Raises InvalidRequest, Unavailable."""
        message = frame(conversation)
        weight = len(conversation.messages) + len(message) // _BYTES_PER_WEIGHT
        worker = await self._worker(weight)
        try:
            rendered = await worker.render(message)
        finally:
            self._idle.append(worker)
            self._serve_waiting()
        if rendered.text is None:
            raise InvalidRequest(f"messages: {rendered.reason}", param="messages", code=rendered.code)
        return rendered.text

    async def _worker(self, weight: int) -> "_Worker":
        if len(self._waiting) >= self._limits.max_waiting:
            raise self._busy()
        future: asyncio.Future[_Worker] = asyncio.get_running_loop().create_future()
        heapq.heappush(self._waiting, (weight, next(self._order), future))
        self._serve_waiting()
        try:
            async with asyncio.timeout(self._limits.wait_seconds):
                return await future
        except BaseException as error:
            if future.done() and not future.cancelled():
                self._idle.append(future.result())
                self._serve_waiting()
            else:
                self._waiting = [entry for entry in self._waiting if entry[2] is not future]
                heapq.heapify(self._waiting)
            raise self._busy() from error if isinstance(error, TimeoutError) else error

    def _serve_waiting(self) -> None:
        """Give idle workers to the shortest conversations that wait."""
        while self._waiting:
            weight, _, future = self._waiting[0]
            if future.done():  # it is cancelled, and about to leave by itself
                heapq.heappop(self._waiting)
                continue
            able = [worker for worker in self._idle if worker is not self._for_short]
            if weight <= _SHORT_WEIGHT and self._for_short in self._idle:
                able = [self._for_short]
            if not able:
                return
            heapq.heappop(self._waiting)
            self._idle.remove(able[0])
            future.set_result(able[0])

    def _busy(self) -> Unavailable:
        return Unavailable(
            "too many conversations wait for the model's chat template; try again shortly",
            code="template_busy",
            retry_after_seconds=_RETRY_SECONDS,
        )


class _Worker:
    """One worker process, which renders a conversation at a time."""

    def __init__(self, setup: TemplateSetup, limits: RenderLimits) -> None:
        self._limits = limits
        self._process = WorkerProcess(_WORKER, frame(setup), wall_seconds=limits.wall_seconds)
        self.end = self._process.end

    async def render(self, message: bytes) -> Rendered:
        """Return the worker's answer to one conversation."""
        try:
            answer = await self._process.ask(message)
        except WorkerTooSlow:
            return too_slow(self._limits.wall_seconds)
        except WorkerFailed:
            return Rendered(reason="the model's chat template failed on them", code="template_failed")
        return msgspec.json.decode(answer, type=Rendered)
