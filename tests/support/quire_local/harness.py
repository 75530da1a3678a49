"""Shared parts of the tests of local processes: a fake engine's command, short intervals, waiting for a change."""

import asyncio
import sys
from collections.abc import Callable
from pathlib import Path

from quire_cli.local.process import Pace

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


def _stat(pid: int) -> list[str]:
    """Return the fields of /proc/PID/stat after the command; empty for a process that has ended."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return []
    return [] if fields[0] in ("Z", "X") else fields


def is_alive(pid: int) -> bool:
    return bool(_stat(pid))


def session_members(leader: int) -> list[int]:
    """Return the live processes of the session that a process leads."""
    pids = (int(folder.name) for folder in Path("/proc").glob("[0-9]*"))
    return [pid for pid in pids if _stat(pid)[3:4] == [str(leader)]]


async def until_dead(pids: list[int]) -> None:
    """Wait for the end of processes that are not our children, by polling."""
    async with asyncio.timeout(60):
        while any(is_alive(pid) for pid in pids):
            await asyncio.sleep(0.02)
