"""The download of a model's files by HTTP range requests, several files at once, each verified.

Used by ``model_cache`` with an ``Origin``, which provides the requests. A file is named ``.NAME.part`` until its length
and checksum are correct. An interrupted download continues with the data that is there.
"""

import asyncio
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import httpx

from quire_engine import __version__
from quire_engine.errors import FetchError
from quire_engine.fetch.remote_files import Answer, Listing, Origin, Progress, RemoteFile

_AT_ONCE = 8
_PIECE_BYTES = 1 << 20
_MAX_REFUSAL_BYTES = 64 << 10
_TRANSIENT = frozenset({408, 425, 429, 500, 502, 503, 504})


@dataclass(frozen=True, slots=True, kw_only=True)
class Patience:
    """The timeouts and retries of a transfer."""

    read_timeout_seconds: float = 30.0
    attempts: int = 6
    """Attempts in a row without a new byte."""
    first_wait_seconds: float = 1.0
    """Doubled with each attempt."""


async def transfer(origin: Origin, listing: Listing, folder: Path, *, progress: Progress, patience: Patience) -> None:
    """Download every missing file of the listing to ``folder``. Raise FetchError and OSError."""
    total = sum(file.size_bytes for file in listing.files)
    missing = [file for file in listing.files if not (folder / file.name).exists()]
    here = {file.name: file.size_bytes for file in listing.files if file not in missing}
    here |= {file.name: _size(part_of(folder, file)) for file in missing}

    def arrived(name: str, size: int) -> None:
        here[name] = size
        progress(sum(here.values()), total)

    progress(sum(here.values()), total)
    if not missing:
        return
    gate = asyncio.Semaphore(_AT_ONCE)
    # Ranges refer to the unencoded bytes.
    headers = {"User-Agent": f"quire/{__version__}", "Accept-Encoding": "identity"}
    timeout = httpx.Timeout(patience.read_timeout_seconds)
    async with httpx.AsyncClient(
        headers=headers, timeout=timeout, follow_redirects=True, verify=origin.trust()
    ) as client:
        try:
            async with asyncio.TaskGroup() as files:
                for file in sorted(missing, key=lambda file: file.size_bytes):
                    one = _Transfer(client, origin, listing.model, file, folder, arrived, patience)
                    files.create_task(one.run(gate))
        except ExceptionGroup as group:
            raise group.exceptions[0] from group  # One reason is enough; the others are mostly the same.


def missing_bytes(listing: Listing, folder: Path) -> int:
    """Return the number of bytes that are still missing."""
    files = (file for file in listing.files if not (folder / file.name).exists())
    return sum(file.size_bytes - min(_size(part_of(folder, file)), file.size_bytes) for file in files)


def part_of(folder: Path, file: RemoteFile) -> Path:
    target = folder / file.name
    return target.with_name(f".{target.name}.part")


class _Transfer:
    """The download of one file until it is complete."""

    def __init__(
        self,
        client: httpx.AsyncClient,
        origin: Origin,
        model: str,
        file: RemoteFile,
        folder: Path,
        arrived: Callable[[str, int], None],
        patience: Patience,
    ) -> None:
        self._client, self._origin, self._model, self._file = client, origin, model, file
        self._target, self._part = folder / file.name, part_of(folder, file)
        self._arrived, self._patience = arrived, patience

    async def run(self, gate: asyncio.Semaphore) -> None:
        async with gate:
            self._part.parent.mkdir(parents=True, exist_ok=True)
            self._part.touch()
            failures = 0
            while (before := _size(self._part)) < self._file.size_bytes:
                problem = await self._attempt(before) or ConnectionError(f"{self._file.name} came short")
                now = _size(self._part)
                if now >= self._file.size_bytes:
                    break
                failures = 1 if now > before else failures + 1
                if failures >= self._patience.attempts:
                    raise self._origin.unreachable(problem)
                await asyncio.sleep(self._patience.first_wait_seconds * 2 ** (failures - 1))
            await asyncio.to_thread(self._check)
            self._part.replace(self._target)

    async def _attempt(self, start: int) -> Exception | None:
        """Fetch the missing part; return the transient problem that ended it early, or None."""
        request = await asyncio.to_thread(self._origin.request, self._file)
        headers = dict(request.headers)
        if start:
            headers["Range"] = f"bytes={start}-"
        try:
            async with self._client.stream("GET", request.url, headers=headers) as response:
                if response.status_code in (200, 206):
                    await self._append(response, start if response.status_code == 206 else 0)
                    return None
                return await self._refused(response)
        except (httpx.TransportError, httpx.TooManyRedirects) as error:
            return error

    async def _refused(self, response: httpx.Response) -> Exception:
        what = ConnectionError(f"{self._file.name}: HTTP {response.status_code}")
        if response.status_code in _TRANSIENT:
            return what
        body = bytearray()
        async for piece in response.aiter_raw(_MAX_REFUSAL_BYTES):
            body += piece
            if len(body) >= _MAX_REFUSAL_BYTES:
                break
        answer = Answer(status=response.status_code, body=bytes(body), headers=response.headers)
        refusal = self._origin.refusal(self._file, answer)
        if refusal is not None:
            raise refusal
        return what

    async def _append(self, response: httpx.Response, start: int) -> None:
        with self._part.open("r+b") as out:
            out.seek(start)
            out.truncate()
            async for piece in response.aiter_raw(_PIECE_BYTES):
                # A thread, so that a slow volume delays neither the other files nor the heartbeat of the lock.
                await asyncio.to_thread(_write, out, piece)
                self._arrived(self._file.name, out.tell())
                if out.tell() > self._file.size_bytes:
                    return  # This is not the listed file; it must not fill the disk.

    def _check(self) -> None:
        """Raise FetchError, and delete the file, unless its size and checksum match the listing."""
        problem = None
        with self._part.open("rb") as file:
            size = _size(self._part)
            if size != self._file.size_bytes:
                problem = f"it has {size} bytes and should have {self._file.size_bytes}"
            elif not self._is_right(file):
                assert self._file.checksum is not None
                problem = f"its {self._file.checksum.algorithm} checksum is wrong"
            else:
                os.fsync(file.fileno())  # A file in its final place must be complete, also after a power failure.
        if problem is not None:
            self._part.unlink()
            raise FetchError(
                f"{self._file.name} of {self._model} arrived damaged: {problem}", hint="run the command again"
            )

    def _is_right(self, file: BinaryIO) -> bool:
        checksum = self._file.checksum
        if checksum is None:
            return True
        digest = checksum.start(self._file.size_bytes)
        while piece := file.read(_PIECE_BYTES):
            digest.update(piece)
        return digest.hexdigest() == checksum.hex


def _write(out: BinaryIO, piece: bytes) -> None:
    out.write(piece)
    out.flush()  # Data that is reported as arrived must survive a kill.


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return 0
