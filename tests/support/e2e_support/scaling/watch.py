"""Observation of an LLMDeployment's replicas during a scenario; ``looks`` evaluates the observations."""

from collections.abc import Callable
from contextlib import suppress
from typing import Self

from e2e_support.errors import ApiError
from e2e_support.polling import Polling
from e2e_support.scaling.looks import Look, look_of
from e2e_support.space import LLMDeployment


class ReplicaWatch(Polling):
    """A context manager whose observations remain available afterwards.

    An API server that does not answer leaves a gap.
    """

    def __init__(self, deployment: LLMDeployment, *, clock: Callable[[], float]) -> None:
        """Store ``clock``, the clock of the traffic, so that both use the same times."""
        super().__init__(self._take)
        self._deployment, self._clock = deployment, clock
        self._looks: list[Look] = []

    def __enter__(self) -> Self:
        super().__enter__()
        self.until(lambda look: True, what="it can be looked at", seconds=30)
        return self

    @property
    def looks(self) -> list[Look]:
        """Return the observations, oldest first."""
        return list(self._looks)

    def until(self, is_so: Callable[[Look], bool], *, what: str, seconds: float) -> None:
        """Wait for an observation for which this is true."""

        def is_newest_so() -> bool:
            self.check()
            return bool(self._looks) and is_so(self._looks[-1])

        self._deployment.until(is_newest_so, what=what, seconds=seconds)

    def _take(self) -> None:
        with suppress(ApiError):  # it may be away; that is a matter of other assertions
            self._looks.append(look_of(self._deployment.body(), self._deployment.pods(), time=self._clock()))
