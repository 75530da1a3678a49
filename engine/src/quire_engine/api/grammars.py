"""The worker processes that compile the grammars of requests, and the grammars that were compiled lately.

A worker is ``python -m quire_engine.api.grammars``.
"""

import asyncio
import math
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from time import monotonic
from typing import Protocol

import msgspec

from quire_engine.api.worker_process import (
    WorkerFailed,
    WorkerProcess,
    WorkerTooSlow,
    answer_frames,
    bound_memory,
    frame,
)
from quire_engine.errors import InvalidRequest, Unavailable
from quire_engine.grammar.spec import GrammarError, GrammarSpec, Vocabulary


class GrammarSetup(msgspec.Struct, frozen=True, kw_only=True):
    """The vocabulary of a worker and its bounds."""

    vocabulary: Vocabulary
    memory_bytes: int
    """The address space of the process."""


class Task(msgspec.Struct, frozen=True, kw_only=True):
    """A grammar to compile."""

    spec: GrammarSpec


class Compiled(msgspec.Struct, frozen=True, kw_only=True):
    """A grammar of llguidance, or the reason why it cannot be compiled."""

    grammar: str = ""
    reason: str | None = None


MAX_TEXT_CHARACTERS = 131_072
_WORKER = "quire_engine.api.grammars"
_RETRY_SECONDS = 2


class GrammarCompiler(Protocol):
    """The compiler of grammars, wherever it runs."""

    async def compile(self, spec: GrammarSpec) -> str:
        """Return the grammar of a constraint for the engine. Raises InvalidRequest, Unavailable."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GrammarLimits:
    """The bounds of the workers."""

    workers: int = 2
    """The number of processes; they start when they are needed, so that a slow grammar delays no other one."""
    wall_seconds: float = 0.9
    """The time that one grammar may take; then its worker is killed."""
    memory_bytes: int = 2 * 2**30
    max_waiting: int = 64
    """The most grammars that wait for a worker."""
    kept: int = 128
    """The number of grammars whose result is kept."""
    failure_seconds: float = 5.0
    """The time for which a grammar that took too long is not tried again. The load of the machine may have been why."""


@dataclass(frozen=True, slots=True)
class _Kept:
    compiled: Compiled
    until: float
    """The time from which it counts no more."""


class GrammarPool:
    """A GrammarCompiler in worker processes. ``close`` ends them."""

    def __init__(self, limits: GrammarLimits | None = None, now: Callable[[], float] = monotonic) -> None:
        self._limits = limits or GrammarLimits()
        self._now = now
        self._known = asyncio.Event()
        self._workers: list[WorkerProcess] = []
        self._idle: asyncio.Queue[WorkerProcess] = asyncio.Queue()
        self._waiting = 0
        self._kept: OrderedDict[GrammarSpec, _Kept] = OrderedDict()

    def set_vocabulary(self, vocabulary: Vocabulary | None) -> None:
        """Let grammars be compiled; None refuses them, because the tokens of this model have no text of their own."""
        if vocabulary is not None:
            setup = frame(GrammarSetup(vocabulary=vocabulary, memory_bytes=self._limits.memory_bytes))
            for _ in range(self._limits.workers):
                self._workers.append(WorkerProcess(_WORKER, setup, wall_seconds=self._limits.wall_seconds))
                self._idle.put_nowait(self._workers[-1])
        self._known.set()

    async def compile(self, spec: GrammarSpec) -> str:
        """Return the grammar of a constraint for the engine. Raises InvalidRequest, Unavailable."""
        if len(spec.text) > MAX_TEXT_CHARACTERS:
            raise _invalid(
                spec, f"it has {len(spec.text)} characters; at most {MAX_TEXT_CHARACTERS} are accepted", too_large=True
            )
        compiled = self._known_result(spec)
        if compiled is None:
            compiled = await self._compile(spec)
        if compiled.reason is not None:
            raise _invalid(spec, compiled.reason)
        return compiled.grammar

    def _known_result(self, spec: GrammarSpec) -> Compiled | None:
        kept = self._kept.get(spec)
        if kept is None:
            return None
        if self._now() >= kept.until:
            del self._kept[spec]
            return None
        self._kept.move_to_end(spec)
        return kept.compiled

    def _keep(self, spec: GrammarSpec, compiled: Compiled, seconds: float = math.inf) -> Compiled:
        self._kept[spec] = _Kept(compiled, self._now() + seconds)
        while len(self._kept) > self._limits.kept:
            self._kept.popitem(last=False)
        return compiled

    async def _compile(self, spec: GrammarSpec) -> Compiled:
        await self._known.wait()
        if not self._workers:
            raise InvalidRequest(
                f"{spec.param}: this model's tokenizer cannot be constrained by a grammar",
                param=spec.field,
                code="grammar_unsupported",
            )
        if self._waiting >= self._limits.max_waiting:
            raise Unavailable(
                "too many grammars wait to be compiled; try again shortly",
                code="grammars_busy",
                retry_after_seconds=_RETRY_SECONDS,
            )
        self._waiting += 1
        try:
            worker = await self._idle.get()
        finally:
            self._waiting -= 1
        try:
            return self._keep(spec, msgspec.json.decode(await worker.ask(frame(Task(spec=spec))), type=Compiled))
        except WorkerTooSlow:
            reason = f"it is too complex: compiling it takes more than {self._limits.wall_seconds:g} s"
        except WorkerFailed:
            reason = "it is too complex: compiling it failed"
        finally:
            self._idle.put_nowait(worker)
        return self._keep(spec, Compiled(reason=reason), self._limits.failure_seconds)

    async def close(self) -> None:
        """End all workers."""
        for worker in self._workers:
            await worker.end()


def _invalid(spec: GrammarSpec, reason: str, *, too_large: bool = False) -> InvalidRequest:
    code = "grammar_too_large" if too_large else "invalid_grammar"
    return InvalidRequest(f"{spec.param}: cannot be compiled: {reason}", param=spec.field, code=code)


def main() -> None:
    """Answer grammars until the input ends."""
    answer_frames(_set_up, ready=Compiled())


def _set_up(message: bytes) -> Callable[[bytes], Compiled]:
    from quire_engine.grammar.compiler import compile_grammar, make_tokenizer  # only a worker compiles

    setup = msgspec.json.decode(message, type=GrammarSetup)
    tokenizer = make_tokenizer(setup.vocabulary)
    bound_memory(setup.memory_bytes)

    def compiled(task: bytes) -> Compiled:
        spec = msgspec.json.decode(task, type=Task).spec
        try:
            return Compiled(grammar=compile_grammar(spec, setup.vocabulary, tokenizer))
        except GrammarError as error:
            return Compiled(reason=str(error))
        except MemoryError:
            return Compiled(reason="it needs too much memory")

    return compiled


if __name__ == "__main__":
    main()
