"""Work that the ranks of a group do at the same time, and that counts only if it succeeded on all of them."""

from collections.abc import Callable, Sequence
from typing import Protocol, TypeVar

import msgspec

Result = TypeVar("Result")


class Store(Protocol):
    """The functions of a ``torch.distributed.Store`` that are used."""

    def set(self, key: str, value: bytes, /) -> object: ...

    def get(self, key: str, /) -> bytes:
        """Wait for a key and return its value. Raise RuntimeError if it does not appear in time."""
        ...


class FailedTogether(Exception):
    """A rank could not do its part. Every rank raises it, with the same message."""


class _Outcome(msgspec.Struct, frozen=True):
    result: msgspec.Raw = msgspec.Raw(b"\xc0")
    failure: str | None = None


class Together:
    """The ranks of a group, which call the same methods in the same order."""

    def __init__(self, store: Store, name: str, rank: int, ranks: Sequence[int]) -> None:
        """Create it. ``name`` is that of the work, and ``ranks`` are those of the group in order, ``rank`` included."""
        self._store, self._name, self._rank = store, name, rank
        self.ranks = tuple(ranks)
        self._steps = 0

    def do(self, work: Callable[[], Result], result_type: type[Result]) -> list[Result]:
        """Do the work here while the others do theirs, and return the results of all, in the order of ranks.

        Raise FailedTogether on all ranks if it raised an exception on one of them, and RuntimeError if a rank is gone.
        """
        try:
            outcome = _Outcome(result=msgspec.Raw(msgspec.msgpack.encode(work())))
        # Whatever it is, the other ranks wait for it.
        except Exception as failure:
            outcome = _Outcome(failure=" ".join(str(failure).split()) or type(failure).__name__)
        self._steps += 1
        key = f"{self._name}/{self.ranks[0]}/{self._steps}"
        self._store.set(f"{key}/{self._rank}", msgspec.msgpack.encode(outcome))
        found = [msgspec.msgpack.decode(self._store.get(f"{key}/{rank}"), type=_Outcome) for rank in self.ranks]
        failures: dict[str, list[int]] = {}
        for rank, one in zip(self.ranks, found, strict=True):
            if one.failure is not None:
                failures.setdefault(one.failure, []).append(rank)
        if failures:
            raise FailedTogether("; ".join(self._by(reason, ranks) for reason, ranks in failures.items()))
        return [msgspec.msgpack.decode(one.result, type=result_type) for one in found]

    def _by(self, reason: str, ranks: Sequence[int]) -> str:
        if len(ranks) == len(self.ranks):
            return reason
        return f"{reason} (rank {', '.join(map(str, ranks))})"
