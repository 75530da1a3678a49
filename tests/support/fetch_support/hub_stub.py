"""The part of a Hugging Face hub that quire uses: revisions, their files, and ranges of them. On loopback, in a thread.

``cut`` makes the next download of a file end after that many bytes, like a lost connection.
"""

import asyncio
import hashlib
import json
import threading
from collections.abc import Iterator, Mapping
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Protocol

from aiohttp import web

COMMIT = "1" * 40


@dataclass
class HubStub:
    repository: str
    files: Mapping[str, bytes]
    cut: dict[str, int] = field(default_factory=dict)
    """The bytes after which the connection is cut, by file; each cut happens once."""
    damaged: set[str] = field(default_factory=set)
    """Files whose last byte is wrong."""
    forbidden: bool = False
    """The files require access."""
    stumbles: dict[str, int] = field(default_factory=dict)
    """The number of 503 answers before success, by file."""
    served: list[tuple[str, str]] = field(default_factory=list)
    """File and Range header of each download, in order."""
    tokens: list[str | None] = field(default_factory=list)
    stall_after: dict[str, int] = field(default_factory=dict)
    """The bytes after which nothing more is sent, by file; each stall happens once."""

    def app(self) -> web.Application:
        app = web.Application()
        app.router.add_get("/api/models/{org}/{name}/revision/{revision}", self._info)
        app.router.add_get("/{org}/{name}/resolve/{revision}/{path:.+}", self._file)
        return app

    def ranges(self, file: str) -> list[str]:
        """Return the Range of each download of a file; empty for the whole."""
        return [wanted for name, wanted in self.served if name == file]

    def _problem(self, request: web.Request) -> web.Response | None:
        self.tokens.append(request.headers.get("Authorization"))
        if f"{request.match_info['org']}/{request.match_info['name']}" != self.repository:
            return web.json_response({}, status=404, headers={"X-Error-Code": "RepoNotFound"})
        if request.match_info["revision"] not in ("main", COMMIT):
            return web.json_response({}, status=404, headers={"X-Error-Code": "RevisionNotFound"})
        return None

    async def _info(self, request: web.Request) -> web.Response:
        files = [
            {
                "rfilename": name,
                "size": len(data),
                "blobId": hashlib.sha1(f"blob {len(data)}\0".encode() + data).hexdigest(),
                "lfs": {"sha256": hashlib.sha256(data).hexdigest(), "size": len(data), "pointerSize": 130}
                if name.endswith(".safetensors")
                else None,
            }
            for name, data in self.files.items()
        ]
        body = {"id": self.repository, "sha": COMMIT, "siblings": files, "private": False, "tags": [], "downloads": 0}
        return self._problem(request) or web.json_response(body)

    async def _file(self, request: web.Request) -> web.StreamResponse:
        problem = self._problem(request)
        if problem is not None:
            return problem
        name = request.match_info["path"]
        data = self.files.get(name)
        if data is None:
            return web.Response(status=404, headers={"X-Error-Code": "EntryNotFound", "X-Repo-Commit": COMMIT})
        if self.forbidden:
            return web.json_response({}, status=403, headers={"X-Error-Code": "GatedRepo"})
        if self.stumbles.get(name):
            self.stumbles[name] -= 1
            return web.Response(status=503)
        if name in self.damaged:
            data = data[:-1] + b"!"
        headers = {"X-Repo-Commit": COMMIT, "ETag": f'"{hashlib.sha1(data).hexdigest()}"', "Accept-Ranges": "bytes"}
        if request.method == "HEAD":
            return web.Response(headers={**headers, "Content-Length": str(len(data))})
        self.served.append((name, request.headers.get("Range", "")))
        wanted = request.http_range
        start, stop = wanted.start or 0, min(wanted.stop or len(data), len(data))
        status = 206 if "Range" in request.headers else 200
        if status == 206:
            headers["Content-Range"] = f"bytes {start}-{stop - 1}/{len(data)}"
        response = web.StreamResponse(status=status, headers={**headers, "Content-Length": str(stop - start)})
        await response.prepare(request)
        stall = self.stall_after.pop(name, None)
        if stall is not None:
            await response.write(data[start:stall])
            await asyncio.Event().wait()
        cut = self.cut.pop(name, None)
        await response.write(data[start : stop if cut is None else cut])
        if cut is not None and request.transport is not None:
            request.transport.abort()
        return response


class Stub(Protocol):
    def app(self) -> web.Application: ...


@contextmanager
def serving(stub: Stub) -> Iterator[str]:
    """Yield the address of the stub while it runs in its own thread, because some clients block theirs."""
    address: Future[tuple[str, asyncio.AbstractEventLoop, asyncio.Event]] = Future()

    async def serve() -> None:
        runner = web.AppRunner(stub.app(), handler_cancellation=True, shutdown_timeout=0.1)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        host, port = runner.addresses[0][:2]
        over = asyncio.Event()
        address.set_result((f"http://{host}:{port}", asyncio.get_running_loop(), over))
        await over.wait()
        await runner.cleanup()

    thread = threading.Thread(target=asyncio.run, args=(serve(),))
    thread.start()
    url, loop, over = address.result(timeout=10)
    try:
        yield url
    finally:
        loop.call_soon_threadsafe(over.set)
        thread.join()


def safetensors(elements: int) -> bytes:
    """Return a file with one tensor of bytes."""
    header = json.dumps({"w": {"dtype": "U8", "shape": [elements], "data_offsets": [0, elements]}}).encode()
    return len(header).to_bytes(8, "little") + header + (bytes(range(251)) * (elements // 251 + 1))[:elements]
