"""One holder at a time, with and without flock: a dead holder blocks others only briefly, a live one keeps the lock."""

import asyncio
import fcntl
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from quire_engine.fetch import folder_lock
from quire_engine.fetch.folder_lock import LockPace, locked

PACE = LockPace(poll_seconds=0.02, beat_seconds=0.05, stale_seconds=0.5, say_seconds=0.1)
UNHURRIED = replace(PACE, stale_seconds=60.0)
"""A process that gets the lock within half of that did not wait for a heartbeat to stop."""
BEATS = replace(PACE, stale_seconds=2.0)
"""A holder on a busy machine may miss some heartbeats."""
HOLDER = """
import asyncio, sys
from pathlib import Path
from quire_engine.fetch.folder_lock import LockPace, locked

async def hold():
    async with locked(Path(sys.argv[1]), pace=LockPace(beat_seconds=0.05)):
        print("held", flush=True)
        await asyncio.Event().wait()

asyncio.run(hold())
"""


@contextmanager
def holder(folder: Path) -> Iterator[subprocess.Popen[str]]:
    """Yield another process that holds the lock until it is killed."""
    with subprocess.Popen([sys.executable, "-c", HOLDER, str(folder)], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None and process.stdout.readline() == "held\n"
        yield process
        process.kill()


@pytest.fixture(params=["flock", "no flock"])
def flock(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Return True if the file system supports flock."""
    if request.param == "no flock":
        monkeypatch.setattr(fcntl, "flock", no_flock)
    return bool(request.param == "flock")


def no_flock(file: object, operation: int) -> None:
    raise OSError(95, "Operation not supported")


async def test_lock_is_held_by_one_task_at_a_time(tmp_path: Path, flock: bool) -> None:
    inside: list[int] = []
    most = 0

    async def work(number: int) -> None:
        nonlocal most
        async with locked(tmp_path, pace=UNHURRIED):
            inside.append(number)
            most = max(most, len(inside))
            await asyncio.sleep(0.01)
            inside.remove(number)

    await asyncio.gather(*(work(number) for number in range(8)))
    assert most == 1
    assert not (tmp_path / "lock.owner").exists()


async def test_lock_of_a_killed_process_is_released_at_once(tmp_path: Path) -> None:
    with holder(tmp_path) as process:
        said: list[str] = []
        waiting = asyncio.create_task(held_for_a_moment(tmp_path, said, UNHURRIED))
        while not said:
            await asyncio.sleep(0.01)
        assert said[0].endswith(f":{process.pid}"), "the message names the holder"
        process.kill()
        process.wait()
        await asyncio.wait_for(waiting, UNHURRIED.stale_seconds / 2)  # the kernel knows that it is dead


async def held_for_a_moment(folder: Path, said: list[str], pace: LockPace = PACE) -> None:
    async with locked(folder, waiting=said.append, pace=pace):
        pass


async def test_stale_heartbeat_means_a_dead_holder_without_flock(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with holder(tmp_path) as process:
        monkeypatch.setattr(fcntl, "flock", no_flock)
        waiting = asyncio.create_task(held_for_a_moment(tmp_path, [], BEATS))
        await asyncio.sleep(1.5 * BEATS.stale_seconds)
        assert not waiting.done(), "one that beats is alive, however long it takes"
        process.kill()
        process.wait()
        await asyncio.wait_for(waiting, 60)


async def test_holder_on_another_node_counts_although_flock_is_free(tmp_path: Path) -> None:
    owner = {"holder": "x", "kernel": "another", "name": "pod-7:1", "beat": 0}
    (tmp_path / "lock.owner").write_text(json.dumps(owner))
    said: list[str] = []
    began = time.monotonic()
    await held_for_a_moment(tmp_path, said)
    assert time.monotonic() - began >= PACE.stale_seconds and said[0] == "pod-7:1"


async def test_stale_lock_of_the_same_kernel_is_acquired_at_once(tmp_path: Path) -> None:
    kernel = folder_lock._kernel(tmp_path)
    (tmp_path / "lock.owner").write_text(json.dumps({"holder": "x", "kernel": kernel, "name": "y", "beat": 3}))
    await asyncio.wait_for(held_for_a_moment(tmp_path, [], UNHURRIED), UNHURRIED.stale_seconds / 2)


@pytest.mark.parametrize("text", ["", "{", "[]", "null"])
async def test_interrupted_writer_is_waited_for_once(tmp_path: Path, text: str) -> None:
    (tmp_path / "lock.owner").write_text(text)
    began = time.monotonic()
    await held_for_a_moment(tmp_path, [])
    assert time.monotonic() - began >= PACE.stale_seconds


async def test_loser_of_the_lock_neither_beats_nor_releases_it(tmp_path: Path) -> None:
    next_owner = json.dumps({"holder": "next", "kernel": "another", "name": "next", "beat": 0})
    async with locked(tmp_path, pace=PACE):
        (tmp_path / "lock.owner").write_text(next_owner)
        await asyncio.sleep(4 * PACE.beat_seconds)
        assert (tmp_path / "lock.owner").read_text() == next_owner
    assert (tmp_path / "lock.owner").read_text() == next_owner


async def test_cancelled_waiter_leaves_the_lock_unchanged(tmp_path: Path, flock: bool) -> None:
    async with locked(tmp_path, pace=PACE):
        waiting = asyncio.create_task(held_for_a_moment(tmp_path, []))
        await asyncio.sleep(3 * PACE.poll_seconds)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        assert json.loads((tmp_path / "lock.owner").read_text())["name"].endswith(f":{os.getpid()}")
