"""A thread that observes an LLMDeployment's replicas during a scenario; ``looks`` evaluates the observations."""

import threading
from collections.abc import Callable
from types import TracebackType
from typing import Final, Self

from e2e_support.errors import ApiError
from e2e_support.scaling.looks import Look, look_of
from e2e_support.space import LLMDeployment

EVERY_SECONDS: Final = 0.5


class ReplicaWatch:
    """A context manager whose observations remain available afterwards.

    An API server that does not answer leaves a gap. Any other error ends the watch and is raised on exit.
    """

    def __init__(self, deployment: LLMDeployment, *, clock: Callable[[], float], every: float = EVERY_SECONDS) -> None:
        """Store ``clock``, the clock of the traffic, so that both use the same times."""
        self._deployment, self._clock, self._every = deployment, clock, every
        self._looks: list[Look] = []
        self._stop = threading.Event()
        self._error: Exception | None = None
        self._thread = threading.Thread(target=self._run, name=f"watch of {deployment.name}", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        self.until(lambda look: True, what="it can be looked at", seconds=30)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop.set()
        self._thread.join()
        if self._error is not None and error is None:
            raise self._error

    @property
    def looks(self) -> list[Look]:
        """Return the observations, oldest first."""
        return list(self._looks)

    def until(self, is_so: Callable[[Look], bool], *, what: str, seconds: float) -> float:
        """Return the first observation for which this is true, waiting if necessary."""

        def newest() -> Look | None:
            if self._error is not None:
                raise self._error
            return self._looks[-1] if self._looks and is_so(self._looks[-1]) else None

        found: Look = self._deployment.until(newest, what=what, seconds=seconds)
        return found.time

    def _run(self) -> None:
        while not self._stop.is_set():
            try:
                self._looks.append(look_of(self._deployment.body(), self._deployment.pods(), time=self._clock()))
            except ApiError:
                pass  # it may be away; that is a matter of other assertions
            except Exception as error:
                self._error = error
                return
            self._stop.wait(self._every)
