"""Time that passes only while everybody waits: what the elector does by the clock, however busy the machine is."""

import asyncio
import selectors
from collections.abc import Callable, Mapping

import pytest

from quire_operator.leadership import leader


class _LeapingSelector(selectors.DefaultSelector):
    """Instead of waiting it says that it has waited."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 1000.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        ready = super().select(0)
        if not ready:
            assert timeout is not None, "everybody waits for somebody who will never come"
            self.now += max(0.0, timeout)
        return ready


class LeapingLoop(asyncio.SelectorEventLoop):
    """An event loop whose time leaps to whatever is due next, as soon as nothing is left to do."""

    def __init__(self) -> None:
        self._leaping = _LeapingSelector()
        super().__init__(self._leaping)

    def time(self) -> float:
        return self._leaping.now


def pytest_asyncio_loop_factories(config: pytest.Config, item: pytest.Item) -> Mapping[str, Callable[[], LeapingLoop]]:
    return {"leaping": LeapingLoop}


@pytest.fixture(autouse=True)
def clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """The elector's clock is the loop's."""
    monkeypatch.setattr(leader, "boottime", lambda: asyncio.get_running_loop().time())
