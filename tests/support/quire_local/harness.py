"""Shared parts of the tests of local processes: a fake engine's command, short intervals, waiting for a change."""

import asyncio
import sys
from collections.abc import Callable
from pathlib import Path

from quire_cli.local.process import identify
from quire_cli.local.supervision import Pace

FAKE_ENGINE = (sys.executable, str(Path(__file__).with_name("fake_engine.py")))
HURRY = Pace(
    first_backoff_seconds=0.05,
    longest_backoff_seconds=0.2,
    poll_loading_seconds=0.02,
    poll_ready_seconds=0.05,
    deregister_seconds=0.05,
    report_loading_seconds=0.1,
)


class Watch:
    """A listener that waits until a change makes a condition true."""

    def __init__(self) -> None:
        self._moved = asyncio.Event()

    def __call__(self, *_: object) -> None:
        self._moved.set()

    async def until(self, holds: Callable[[], bool]) -> None:
        async with asyncio.timeout(120):
            while not holds():
                self._moved.clear()
                await self._moved.wait()


def is_alive(pid: int) -> bool:
    return identify(pid) is not None


async def until_dead(pids: list[int]) -> None:
    """Wait for the end of processes that are not our children, by polling."""
    async with asyncio.timeout(60):
        while any(is_alive(pid) for pid in pids):
            await asyncio.sleep(0.02)
