"""``ports.Clock`` by this machine's clock."""

import time


class WallClock:
    """Unix seconds."""

    def now(self) -> float:
        """See ``ports.Clock``."""
        return time.time()
