"""Time that advances only while everything waits, so that the elector's timing does not depend on the machine."""

import asyncio
import selectors
from collections.abc import Callable, Mapping

import pytest

from quire_operator.kube import lease as lease_module


class _LeapingSelector(selectors.DefaultSelector):
    """A selector that reports the end of a wait at once."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 1000.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        ready = super().select(0)
        if not ready:
            assert timeout is not None, "all tasks wait for an event that never happens"
            self.now += max(0.0, timeout)
        return ready


class LeapingLoop(asyncio.SelectorEventLoop):
    """An event loop whose time jumps to the next due callback as soon as nothing is left to run."""

    def __init__(self) -> None:
        self._leaping = _LeapingSelector()
        super().__init__(self._leaping)

    def time(self) -> float:
        return self._leaping.now


def pytest_asyncio_loop_factories(config: pytest.Config, item: pytest.Item) -> Mapping[str, Callable[[], LeapingLoop]]:
    return {"leaping": LeapingLoop}


@pytest.fixture(autouse=True)
def clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """Use the loop's time as the elector's clock."""
    monkeypatch.setattr(lease_module, "boottime", lambda: asyncio.get_running_loop().time())
