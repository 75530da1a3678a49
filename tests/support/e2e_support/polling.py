"""A thread that polls the cluster while a scenario runs."""

import threading
from collections.abc import Callable
from types import TracebackType
from typing import Final, Self

EVERY_SECONDS: Final = 0.5
_LAST_SECONDS: Final = 60.0


class Polling:
    """A context manager that calls `poll` at intervals. An error of it ends the polling and is raised on exit."""

    def __init__(self, poll: Callable[[], None], *, every: float = EVERY_SECONDS) -> None:
        self._poll, self._every = poll, every
        self._stop = threading.Event()
        self._error: Exception | None = None
        self._thread = threading.Thread(target=self._run, name="polling", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop.set()
        self._thread.join(_LAST_SECONDS)
        if error is None:
            self.check()

    def check(self) -> None:
        """Raise RuntimeError if the polling has failed."""
        if self._error is not None:
            raise RuntimeError("the look at the cluster itself failed") from self._error

    def _run(self) -> None:
        try:
            while not self._stop.is_set():
                self._poll()
                self._stop.wait(self._every)
        except Exception as error:
            self._error = error
