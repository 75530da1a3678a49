"""A function on many arguments, in as many processes as there are usable cores."""

import signal
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
from types import TracebackType
from typing import Any, TypeVar

T = TypeVar("T")


class Workers:
    """A pool of processes. With one job everything runs in this process."""

    def __init__(self, jobs: int) -> None:
        self._pool = ProcessPoolExecutor(max_workers=jobs, initializer=_leave_interrupts) if jobs > 1 else None

    def __enter__(self) -> "Workers":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if self._pool is not None:
            self._pool.shutdown(wait=kind is None, cancel_futures=True)

    def map(self, function: Callable[..., T], arguments: Sequence[tuple[Any, ...]]) -> Iterator[tuple[int, T]]:
        """Yield the place in ``arguments`` and the result of each, in order of completion."""
        if self._pool is None:
            yield from ((place, function(*given)) for place, given in enumerate(arguments))
            return
        places: dict[Future[T], int] = {
            self._pool.submit(function, *given): place for place, given in enumerate(arguments)
        }
        for future in as_completed(places):
            yield places[future], future.result()


def _leave_interrupts() -> None:
    """Leave interrupts to the parent, which ends its workers."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
