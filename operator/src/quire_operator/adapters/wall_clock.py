"""``ports.Clock`` with the clock of this machine."""

import time


class WallClock:
    """A clock that returns Unix seconds."""

    def now(self) -> float:
        """See ``ports.Clock``."""
        return time.time()
