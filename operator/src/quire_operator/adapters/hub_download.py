"""The files of a hub's model into quire's cache: resumed after a cut or a kill, checked, complete or not there at all.

The hub's own client starts a file anew in each process, so the transfer is ours: ranges, retries, SHA-256. Layout:
``ORG--NAME/COMMIT/`` holds a model once it is whole; ``COMMIT.partial/`` what there is of it until then;
``refs/REVISION`` names the commit last seen, for when the hub can't be reached.
"""

import asyncio
import fcntl
import hashlib
import shutil
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import quote

import httpx

from quire_operator.adapters import hub
from quire_operator.adapters.hub import HubFile, Listing
from quire_operator.domain.quantities import format_bytes
from quire_operator.errors import ModelProblem

_AT_ONCE = 4
_PIECE_BYTES = 1 << 20
_LOCK_POLL_SECONDS = 0.5
_TRANSIENT = frozenset({408, 425, 429, 500, 502, 503, 504})

Progress = Callable[[int, int], None]
"""Bytes that are here, bytes in all."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Patience:
    """How a transfer bears with the network."""

    read_timeout_seconds: float = 30.0
    attempts: int = 6
    """In a row without a new byte."""
    first_wait_seconds: float = 1.0
    """Doubled with each."""


class Cache:
    """One repository's place in the cache."""

    def __init__(self, root: Path, repository: str) -> None:
        self._folder = root / repository.replace("/", "--")

    def whole(self, commit: str) -> Path:
        return self._folder / commit

    def partial(self, commit: str) -> Path:
        return self._folder / f"{commit}.partial"

    def remember(self, revision: str, commit: str) -> None:
        path = self._folder / "refs" / quote(revision, safe="")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(commit)

    def remembered(self, revision: str) -> Path | None:
        """The whole model that the revision named when the hub last answered."""
        try:
            commit = (self._folder / "refs" / quote(revision, safe="")).read_text()
        except OSError:
            commit = revision
        return self.whole(commit) if self.whole(commit).is_dir() else None

    @asynccontextmanager
    async def locked(self) -> AsyncIterator[None]:
        """Only one process downloads; others wait and find it done."""
        self._folder.mkdir(parents=True, exist_ok=True)
        with (self._folder / "lock").open("a") as lock:
            while True:
                try:
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                except BlockingIOError:
                    await asyncio.sleep(_LOCK_POLL_SECONDS)
            yield


async def fetch(
    repository: str, revision: str, root: Path, *, progress: Progress, patience: Patience | None = None
) -> Path:
    """The folder with the whole model; raises ModelProblem. Cancelled, it leaves what the next call goes on with."""
    cache = Cache(root, repository)
    try:
        listing = await asyncio.to_thread(hub.list_files, repository, revision)
    except hub.Unreachable:
        known = cache.remembered(revision)
        if known is None:
            raise
        return known
    elsewhere = hub.in_the_hubs_own_cache(listing)
    if elsewhere is not None:
        return elsewhere
    try:
        async with cache.locked():
            whole = cache.whole(listing.commit)
            if not whole.is_dir():
                await _download(listing, cache.partial(listing.commit), progress, patience or Patience())
                cache.partial(listing.commit).rename(whole)
            cache.remember(revision, listing.commit)
    except OSError as error:
        raise ModelProblem(f"{repository} can't be kept in {root}: {hub.first_line(error)}") from error
    return whole


async def _download(listing: Listing, folder: Path, progress: Progress, patience: Patience) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    total = sum(file.size_bytes for file in listing.files)
    here = {file.name: _size(folder / file.name) or _size(_part(folder, file)) for file in listing.files}
    _check_room(listing.repository, folder, total - sum(here.values()))

    def arrived(name: str, size: int) -> None:
        here[name] = size
        progress(sum(here.values()), total)

    progress(sum(here.values()), total)
    gate = asyncio.Semaphore(_AT_ONCE)
    headers = hub.request_headers() | {"Accept-Encoding": "identity"}  # a range is one of the bytes as they are
    timeout = httpx.Timeout(patience.read_timeout_seconds)
    async with httpx.AsyncClient(headers=headers, timeout=timeout, follow_redirects=True) as client:
        try:
            async with asyncio.TaskGroup() as files:
                for file in sorted(listing.files, key=lambda file: file.size_bytes):
                    transfer = _Transfer(client, listing.repository, file, folder, arrived, patience)
                    files.create_task(transfer.run(gate))
        except ExceptionGroup as group:
            raise group.exceptions[0] from group  # one reason is enough; the others are mostly the same


class _Transfer:
    """One file, until it is whole."""

    def __init__(
        self,
        client: httpx.AsyncClient,
        repository: str,
        file: HubFile,
        folder: Path,
        arrived: Callable[[str, int], None],
        patience: Patience,
    ) -> None:
        self._client, self._repository, self._file = client, repository, file
        self._target, self._part = folder / file.name, _part(folder, file)
        self._arrived, self._patience = arrived, patience

    async def run(self, gate: asyncio.Semaphore) -> None:
        if self._target.exists():
            return
        async with gate:
            failures = 0
            while not self._part.exists() or _size(self._part) < self._file.size_bytes:
                before = _size(self._part)
                problem = await self._attempt(before) or ConnectionError(f"{self._file.name} came short")
                if _size(self._part) == self._file.size_bytes:
                    break
                failures = 1 if _size(self._part) > before else failures + 1
                if failures >= self._patience.attempts:
                    raise hub.unreachable(self._repository, problem)
                await asyncio.sleep(self._patience.first_wait_seconds * 2 ** (failures - 1))
            await asyncio.to_thread(self._check)
            self._part.rename(self._target)

    async def _attempt(self, start: int) -> Exception | None:
        """Fetch what is missing; the transient problem that ended it early, if one did."""
        headers = {"Range": f"bytes={start}-"} if start else {}
        try:
            async with self._client.stream("GET", self._file.url, headers=headers) as response:
                if response.status_code in (401, 403):
                    raise hub.gated(self._repository)
                if response.status_code in _TRANSIENT:
                    return ConnectionError(f"{self._file.name}: HTTP {response.status_code}")
                if response.status_code not in (200, 206):
                    raise ModelProblem(f"{self._file.url} answered {response.status_code}")
                await self._append(response, start if response.status_code == 206 else 0)
        except httpx.TransportError as error:
            return error
        return None

    async def _append(self, response: httpx.Response, start: int) -> None:
        with self._part.open("r+b" if start else "wb") as out:
            out.seek(start)
            async for piece in response.aiter_raw(_PIECE_BYTES):
                out.write(piece)
                self._arrived(self._file.name, out.tell())

    def _check(self) -> None:
        """Raise ModelProblem, and forget the file, unless it is what the hub says it is."""
        size = _size(self._part)
        problem = None
        if size != self._file.size_bytes:
            problem = f"it has {size} bytes and should have {self._file.size_bytes}"
        elif self._file.sha256 is not None:
            with self._part.open("rb") as file:
                if hashlib.file_digest(file, "sha256").hexdigest() != self._file.sha256:
                    problem = "its SHA-256 is not the one the hub gives"
        if problem is not None:
            self._part.unlink()
            raise ModelProblem(f"{self._file.name} of {self._repository} came damaged: {problem}", hint="run again")


def _part(folder: Path, file: HubFile) -> Path:
    return folder / f".{file.name}.part"


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return 0


def _check_room(repository: str, folder: Path, missing: int) -> None:
    free = shutil.disk_usage(folder).free
    if missing > free:
        raise ModelProblem(
            f"{repository} needs {format_bytes(missing)} more in {folder}, where {format_bytes(free)} are free",
            hint="make room there, or let QUIRE_CACHE name a folder on a larger disk",
        )
