"""The cache of fetched models, on a laptop or on a volume that pods share; each version is complete or absent.

``fetch`` combines an ``Origin``, a lock and a ``transfer``. Layout: ``NAME/VERSION/`` is a complete model;
``NAME/VERSION.partial/`` is an incomplete one; ``NAME/refs/REFERENCE`` names the last known version, which is used if
the origin is unreachable. Folders are renamed into place last, so an existing folder is complete.
"""

import asyncio
import errno
import os
import shutil
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from quire_common.model_source import BucketSource, HubSource, RemoteSource, cached_model, reference_file
from quire_common.quantities import format_bytes
from quire_engine.errors import FetchError
from quire_engine.fetch.folder_lock import LockPace, locked
from quire_engine.fetch.remote_files import Listing, Origin, Progress, Say, Unreachable, first_line
from quire_engine.fetch.transfer import Patience, missing_bytes, transfer
from quire_engine.fetch.version_lock import in_use, lock_file, remove_unused

_PARTIAL = ".partial"
_FULL = frozenset({errno.ENOSPC, errno.EDQUOT})
_ROOM = "make room there, or let QUIRE_CACHE name a folder on a larger disk; on a cluster, a larger spec.model.cache"


@dataclass(frozen=True, slots=True, kw_only=True)
class Manner:
    """The options of a fetch: network patience, lock timing and messages."""

    patience: Patience = field(default_factory=Patience)
    pace: LockPace = field(default_factory=LockPace)
    say: Say = lambda line: None


class Cache:
    """The place of one source in the cache."""

    def __init__(self, root: Path, source: RemoteSource) -> None:
        self.folder = root / source.cache_name
        self._reference = reference_file(root, source)

    def whole(self, version: str) -> Path:
        return self.folder / version

    def partial(self, version: str) -> Path:
        return self.folder / f"{version}{_PARTIAL}"

    def remember(self, version: str) -> None:
        path = self._reference
        path.parent.mkdir(parents=True, exist_ok=True)
        fresh = path.with_name(f"{path.name}.{os.getpid()}")
        fresh.write_text(version)
        fresh.replace(path)

    def complete(self, version: str) -> None:
        """Rename the partial version to the complete one."""
        try:
            self.partial(version).rename(self.whole(version))
        except OSError:
            if not self.whole(version).is_dir():  # Otherwise another process was first, on a file system without locks.
                raise
        lock_file(self.whole(version)).touch()
        folder = os.open(self.folder, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)

    def make_room(self, version: str, *, is_enough: Callable[[], bool], say: Say) -> None:
        """Remove incomplete versions, then versions that no engine uses, until there is enough space."""
        for path in self.folder.glob(f"*{_PARTIAL}"):
            if path != self.partial(version):
                shutil.rmtree(path, ignore_errors=True)
        for path in self.folder.glob(".*.removed"):
            shutil.rmtree(path, ignore_errors=True)
        while not is_enough() and remove_unused(self.folder, keep=self.whole(version)):
            say(f"removed an unused version from {self.folder}")


async def fetch(
    source: RemoteSource, origin: Origin, root: Path, *, progress: Progress, manner: Manner | None = None
) -> Path:
    """Return the folder with the complete model. Raise FetchError.

    If this is cancelled, the next call continues with the data that was downloaded.
    """
    manner = manner or Manner()
    cache = Cache(root, source)
    known = cached_model(root, source)
    if known is not None and source.is_pinned:
        with in_use(known) as is_there:
            if is_there:
                return known
    try:
        listing = await _aside(origin.listing)
    except Unreachable as problem:
        if known is None:
            raise
        manner.say(f"{problem.message}; using what was fetched before")
        return known
    elsewhere = origin.elsewhere(listing)
    if elsewhere is not None:
        return elsewhere
    try:
        return await _kept(cache, origin, listing, progress=progress, manner=manner)
    except OSError as error:
        raise _explained(error, listing.model, root) from error


async def _aside(ask: Callable[[], Listing]) -> Listing:
    """Run ``ask`` in a thread that is abandoned on cancellation, so that a hanging server does not block Ctrl-C."""
    loop, answer = asyncio.get_running_loop(), asyncio.Future[Listing]()

    def settle(outcome: Listing | Exception) -> None:
        if answer.done():
            return  # The caller was cancelled.
        if isinstance(outcome, Exception):
            answer.set_exception(outcome)
        else:
            answer.set_result(outcome)

    def run() -> None:
        try:
            outcome: Listing | Exception = ask()
        except Exception as error:
            outcome = error
        with suppress(RuntimeError):  # The loop is closed; there is no caller any more.
            loop.call_soon_threadsafe(settle, outcome)

    threading.Thread(target=run, name="ask-origin", daemon=True).start()
    return await answer


async def _kept(cache: Cache, origin: Origin, listing: Listing, *, progress: Progress, manner: Manner) -> Path:
    def waiting(holder: str) -> None:
        manner.say(f"{listing.model} is being downloaded to {cache.folder} by {holder}; waiting for it")

    async with locked(cache.folder, waiting=waiting, pace=manner.pace):
        version = listing.version
        whole = cache.whole(version)
        with in_use(whole) as is_there:
            pass
        if not is_there:
            partial = cache.partial(version)
            partial.mkdir(parents=True, exist_ok=True)
            _check_room(cache, listing, manner.say)
            await transfer(origin, listing, partial, progress=progress, patience=manner.patience)
            cache.complete(version)
        cache.remember(version)
    return whole


def _check_room(cache: Cache, listing: Listing, say: Say) -> None:
    partial = cache.partial(listing.version)
    needed = missing_bytes(listing, partial)
    if needed > _free(partial):
        cache.make_room(listing.version, is_enough=lambda: needed <= _free(partial), say=say)
    free = _free(partial)
    if needed > free:
        raise FetchError(
            f"{listing.model} needs {format_bytes(needed)} more in {cache.folder}, where {format_bytes(free)} are free",
            hint=_ROOM,
        )


def _free(folder: Path) -> int:
    usage = shutil.disk_usage(folder)
    return usage.free if usage.total else sys.maxsize  # Some network file systems report no size.


def _explained(error: OSError, model: str, root: Path) -> FetchError:
    if error.errno in _FULL:
        why = "the disk is full" if error.errno == errno.ENOSPC else "the quota is used up"
        return FetchError(f"{model} cannot be stored in {root}: {why}", hint=f"{_ROOM}. Downloaded parts are kept")
    return FetchError(f"{model} cannot be stored in {root}: {first_line(error)}")


def origin_of(source: RemoteSource, *, of_adapter: bool = False) -> Origin:
    """Return the origin of a model's source or, with ``of_adapter``, of an adapter's. Each import is slow."""
    match source:
        case HubSource():
            from quire_engine.fetch.hub import HubOrigin

            return HubOrigin(source)
        case BucketSource():
            from quire_engine.fetch.bucket import BucketOrigin

            return BucketOrigin(source, of_adapter=of_adapter)
