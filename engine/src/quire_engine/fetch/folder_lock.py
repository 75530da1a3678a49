"""An exclusive lock on a folder that processes, pods and nodes share, possibly over a network file system.

Used by ``model_cache``. flock reports the holder at once and is released when its process dies, however it dies. But on
some file systems it works only within one node, and on some not at all. The holder therefore also writes its identity
and a heartbeat counter to a file. If another process has the same kernel and the same mount, and flock is free, the
holder is dead. Otherwise its heartbeat must have stopped for a while. Only changes are compared, never clocks. If even
that fails (a holder was paused for minutes and continued), two processes write the same bytes to the same places, and
checksums decide what is complete.
"""

import asyncio
import errno
import fcntl
import json
import os
import socket
import threading
import time
import uuid
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_UNSUPPORTED = frozenset({errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL})


@dataclass(frozen=True, slots=True, kw_only=True)
class LockPace:
    poll_seconds: float = 0.5
    beat_seconds: float = 5.0
    stale_seconds: float = 45.0
    """The time without a heartbeat after which the holder counts as dead."""
    say_seconds: float = 30.0


@asynccontextmanager
async def locked(
    folder: Path, *, waiting: Callable[[str], None] = lambda holder: None, pace: LockPace | None = None
) -> AsyncIterator[None]:
    """Hold the lock on ``folder`` within the block. Raise OSError.

    waiting  called from time to time with the name of the current holder while this waits
    """
    folder.mkdir(parents=True, exist_ok=True)
    lock = _Lock(folder, pace or LockPace())
    try:
        await lock.acquire(waiting)
        yield
    finally:
        lock.release()


@dataclass(frozen=True, slots=True, kw_only=True)
class _Owner:
    holder: str
    """Unique for each acquisition."""
    kernel: str
    """Equal for processes between which flock is reliable."""
    name: str


class _Lock:
    def __init__(self, folder: Path, pace: LockPace) -> None:
        self._folder, self._pace = folder, pace
        self._owner_path = folder / "lock.owner"
        self._file: IO[str] | None = None
        self._me = _Owner(holder=uuid.uuid4().hex, kernel=_kernel(folder), name=f"{socket.gethostname()}:{os.getpid()}")
        self._over = threading.Event()
        self._beating: threading.Thread | None = None

    async def acquire(self, waiting: Callable[[str], None]) -> None:
        self._file = (self._folder / "lock").open("a")
        said, since = -self._pace.say_seconds, time.monotonic()
        seen: str | None = None
        while True:
            flock = self._flock()
            text = _read(self._owner_path)
            now = time.monotonic()
            if text != seen:
                seen, since = text, now
            if flock is not False and self._take(
                text, sure=flock is True, stale=now - since > self._pace.stale_seconds
            ):
                break
            if now - said >= self._pace.say_seconds:
                said = now
                waiting(_parsed(text or "").name)
            await asyncio.sleep(self._pace.poll_seconds)
        self._beating = threading.Thread(target=self._beat, name="lock-beat", daemon=True)
        self._beating.start()

    def release(self) -> None:
        self._over.set()
        if self._beating is not None:
            self._beating.join()
            with suppress(OSError):
                if self._is_mine():
                    self._owner_path.unlink()
        if self._file is not None:
            self._file.close()  # This also releases the flock.

    def _flock(self) -> bool | None:
        """Return whether flock succeeded; None if the file system does not support it."""
        assert self._file is not None
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        except OSError as error:
            if error.errno in _UNSUPPORTED:
                return None
            raise
        return True

    def _take(self, text: str | None, *, sure: bool, stale: bool) -> bool:
        """Become the owner if there is no owner, or if it must be dead."""
        if text is not None:
            dead = sure and _parsed(text).kernel == self._me.kernel
            if not (dead or stale) or not self._bury(text):
                return False
        try:
            with self._owner_path.open("x") as file:
                file.write(self._text(0))
        except FileExistsError:
            return False
        return True

    def _bury(self, text: str) -> bool:
        """Remove the owner's file. Of several processes one succeeds, and none removes a later owner."""
        grave = self._owner_path.with_name(f"lock.owner.{self._me.holder}")
        try:
            self._owner_path.rename(grave)
        except FileNotFoundError:
            return False
        if _parsed(_read(grave) or "").holder != _parsed(text).holder:
            with suppress(OSError):
                grave.rename(self._owner_path)
            return False
        grave.unlink(missing_ok=True)
        return True

    def _beat(self) -> None:
        fresh = self._owner_path.with_name(f"lock.owner.{self._me.holder}")
        beat = 0
        while not self._over.wait(self._pace.beat_seconds):
            beat += 1
            with suppress(OSError):  # A single heartbeat may fail; after several in a row, another process takes over.
                if self._is_mine():
                    fresh.write_text(self._text(beat))
                    fresh.replace(self._owner_path)

    def _is_mine(self) -> bool:
        return _parsed(_read(self._owner_path) or "").holder == self._me.holder

    def _text(self, beat: int) -> str:
        me = self._me
        return json.dumps({"holder": me.holder, "kernel": me.kernel, "name": me.name, "beat": beat})


def _kernel(folder: Path) -> str:
    try:
        boot = _BOOT_ID.read_text().strip()
    except OSError:
        boot = socket.gethostname()  # This is not Linux but a laptop, without other users' pods.
    return f"{boot}/{folder.stat().st_dev}"


def _read(path: Path) -> str | None:
    try:
        return path.read_text()
    except FileNotFoundError:
        return None


def _parsed(text: str) -> _Owner:
    """Return the owner; an unknown one if the text is incomplete."""
    try:
        body = json.loads(text)
        return _Owner(holder=str(body["holder"]), kernel=str(body["kernel"]), name=str(body["name"]))
    except (ValueError, KeyError, TypeError):
        return _Owner(holder=text, kernel="", name="an unknown process")
