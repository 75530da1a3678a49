"""The trial of symmetric memory when the ranks of a tensor group have connected: it is met, compared, timed and chosen.

Every step counts only if it succeeds on all ranks (``together``); otherwise all of them use NCCL.

Legend: T tokens, H hidden size.
"""

import functools
import hashlib
import logging
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from quire_engine.runner.device.accelerator import Mark
from quire_engine.runner.device.measuring import LARGEST_ERROR, REPLAYS, largest_error
from quire_engine.runner.parallel.all_reduce_choice import (
    TOKENS,
    WAYS,
    AllReduceFacts,
    AllReduceTimes,
    Way,
    WaysBySize,
    fastest,
    in_words,
    refusal,
    slowest,
)
from quire_engine.runner.parallel.symmetric_memory import PeerMemory
from quire_engine.runner.parallel.together import FailedTogether, Together

_log = logging.getLogger(__name__)
_SUMS = 20
"""The sums that are issued one after the other for a time, as in a step."""
_COMPARED = (1, 32, TOKENS[-1])


@dataclass(frozen=True, slots=True, kw_only=True)
class FasterSums:
    """The sums that are faster over symmetric memory than by NCCL."""

    memory: PeerMemory
    dtype: torch.dtype
    ways: WaysBySize

    def __call__(self, x: Tensor) -> Tensor | None:
        """Return the sum of a contiguous ``x`` over the ranks, or None if NCCL adds it; ``x`` may be changed."""
        if x.dtype != self.dtype:
            return None
        way = self.ways.way(x.numel() * x.element_size())
        return None if way is None else self.memory.sum(x, way)


@dataclass(frozen=True, slots=True, kw_only=True)
class AllReduceChoice:
    sums: FasterSums | None
    """None lets NCCL add everything."""
    line: str
    """The choice and its reason, for the start report."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """The things that a rank needs to try symmetric memory."""

    together: Together
    place: int
    """The rank's place in its tensor group."""
    nccl: Callable[[Tensor], Tensor]
    """Return the sum by NCCL."""
    mark: Callable[[], Mark]
    device: torch.device
    dtype: torch.dtype
    columns: int
    """The hidden size."""

    @property
    def ranks(self) -> int:
        return len(self.together.ranks)


def choose_all_reduce(facts: AllReduceFacts, trial: Trial, memory: PeerMemory) -> AllReduceChoice:
    """Return the choice, which is the same on all ranks of the group; all call this at the same time.

    Raise RuntimeError if a rank is gone.
    """
    reasons = trial.together.do(lambda: refusal(facts) or "", str)
    if refused := next(filter(None, reasons), None):
        return _by_nccl(refused)
    try:
        times = _try(trial, memory)
    except FailedTogether as failed:
        memory.release()
        _log.warning("NCCL adds for all ranks, because symmetric memory failed: %s", failed)
        return _by_nccl(f"failed: {failed}")
    chosen = fastest(times)
    line = in_words(times, chosen)
    if not any(chosen):
        memory.release()
        return AllReduceChoice(sums=None, line=line)
    size = trial.columns * trial.dtype.itemsize
    ways = WaysBySize(sizes=tuple(tokens * size for tokens in times.tokens), ways=chosen)
    return AllReduceChoice(sums=FasterSums(memory=memory, dtype=trial.dtype, ways=ways), line=line)


def _by_nccl(reason: str) -> AllReduceChoice:
    return AllReduceChoice(sums=None, line=f"sums of ranks by NCCL: symmetric memory {reason}")


def _try(trial: Trial, memory: PeerMemory) -> AllReduceTimes:
    """Return the longest times over all ranks, of the ways that add correctly. Raise FailedTogether on all ranks."""
    _log.info("trying sums of ranks over symmetric memory, which --disable-custom-all-reduce turns off")
    together = trial.together
    gpus = together.do(lambda: trial.device.index or 0, int)
    together.do(lambda: memory.allocate(gpus), type(None))
    # In ``meet``, rank 0 cannot answer questions of other ranks to the store. It begins when none has one left.
    _wait_for_all(trial)
    offered = together.do(lambda: list(memory.meet()), list[Way])
    ways = [way for way in WAYS if all(way in one for one in offered) and _adds(trial, memory, way)]
    if not ways:
        raise FailedTogether("no way to add gives the right sums")
    return slowest(together.do(lambda: _time_all(trial, memory, ways), AllReduceTimes))


def _wait_for_all(trial: Trial) -> None:
    """Wait until all ranks call this."""
    trial.nccl(torch.zeros(1, dtype=trial.dtype, device=trial.device))
    trial.mark().wait()


def _adds(trial: Trial, memory: PeerMemory, way: Way) -> bool:
    """Return whether a way gives the sums, with the same bits on all ranks."""

    def add() -> bytes:
        digest = hashlib.sha256()
        for tokens in _COMPARED:
            expected, own = _example(trial, tokens)
            found = memory.sum(own, way)
            error = largest_error(found, expected)
            if not error <= LARGEST_ERROR:  # NaN is not
                raise ArithmeticError(f"its sums differ by {error:.2g} with {tokens} tokens")
            digest.update(found.contiguous().view(torch.uint8).cpu().numpy().tobytes())
        return digest.digest()

    try:
        digests = trial.together.do(add, bytes)
    except FailedTogether as failed:
        _log.warning("the GPUs do not add by %s over symmetric memory: %s", way, failed)
        return False
    if len(set(digests)) > 1:
        _log.warning("the GPUs do not add by %s over symmetric memory: the bits differ between ranks", way)
        return False
    return True


def _example(trial: Trial, tokens: int) -> tuple[Tensor, Tensor]:
    """Return the sum [T, H] over all ranks in float32, and this rank's part of it."""
    parts = []
    for place in range(trial.ranks):
        generator = torch.Generator().manual_seed(place)
        part = torch.empty((tokens, trial.columns)).uniform_(0.5, 1.5, generator=generator)
        parts.append(part.to(trial.dtype))
    expected = torch.stack(parts).float().sum(0)
    return expected.to(trial.device), parts[trial.place].to(trial.device)


def _time_all(trial: Trial, memory: PeerMemory, ways: list[Way]) -> AllReduceTimes:
    """Return this rank's times, while all others do the same."""
    nccl: list[float] = []
    taken: dict[Way, list[float]] = {way: [] for way in ways}
    for tokens in TOKENS:
        x = torch.zeros((tokens, trial.columns), dtype=trial.dtype, device=trial.device)
        nccl.append(_time(trial, functools.partial(trial.nccl, x)))
        for way in ways:
            taken[way].append(_time(trial, functools.partial(memory.sum, x, way)))
    return AllReduceTimes(tokens=TOKENS, nccl=tuple(nccl), ways={way: tuple(column) for way, column in taken.items()})


def _time(trial: Trial, add: Callable[[], Tensor]) -> float:
    """Return the least microseconds of a sum among many, launched one by one as the steps of ranks are."""
    add()
    taken = []
    for _ in range(REPLAYS):
        began = trial.mark()
        for _ in range(_SUMS):
            add()
        ended = trial.mark()
        ended.wait()
        taken.append(ended.seconds_since(began) / _SUMS)
    return min(taken) * 1e6
