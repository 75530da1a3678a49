"""The time for which an engine process may be silent before it counts as hung.

``ipc.loop`` announces a step that may take longer than ``--engine-hang-timeout``, and ``ipc.supervision`` waits for it
accordingly. The values contain no clock.
"""

from dataclasses import dataclass

PATIENCE = 10.0
"""The factor by which a step may exceed its expected time: the machine may be busy or throttled."""


def hang_limit(hang_timeout_seconds: float, expected_seconds: float) -> float:
    """Return the time without a step after which the engine counts as hung, for a step's expected time."""
    return max(hang_timeout_seconds, PATIENCE * expected_seconds)


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
