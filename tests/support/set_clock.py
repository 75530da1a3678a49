"""A clock for tests that call it."""


class SetClock:
    """A clock that shows the time that a test sets."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now
