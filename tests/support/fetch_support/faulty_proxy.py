"""A proxy on loopback in front of a store: it forwards everything except what a test breaks."""

import asyncio
from dataclasses import dataclass, field

import aiohttp
from aiohttp import web
from yarl import URL

_SKIPPED = frozenset({"host", "transfer-encoding", "connection", "keep-alive", "content-encoding"})


@dataclass(frozen=True)
class Canned:
    """An answer that the server behind the proxy did not give."""

    status: int
    body: str = ""
    headers: dict[str, str] = field(default_factory=dict)
    times: int = 10**9


@dataclass
class FaultyProxy:
    upstream: str
    canned: dict[str, Canned] = field(default_factory=dict)
    """Answers by the end of the path, optionally with the method in front of it ("GET /m/model.safetensors")."""
    cut: dict[str, int] = field(default_factory=dict)
    """The bytes after which a download breaks off, by the end of its path; each once."""
    stall_after: dict[str, int] = field(default_factory=dict)
    """The bytes after which nothing more is sent; each once."""
    damaged: set[str] = field(default_factory=set)
    """Downloads whose last byte is wrong."""
    seen: list[tuple[str, str, str]] = field(default_factory=list)
    """Method, path and Range of every request."""
    used: dict[str, int] = field(default_factory=dict)

    def app(self) -> web.Application:
        app = web.Application(client_max_size=1 << 30)
        app.router.add_route("*", "/{path:.*}", self._pass_on)
        return app

    def ranges(self, end: str) -> list[str]:
        """Return the Range of each download whose path ends with this."""
        return [wanted for method, path, wanted in self.seen if method == "GET" and path.endswith(end)]

    def _broken(self, request: web.Request) -> web.Response | None:
        for end, answer in self.canned.items():
            if f"{request.method} {request.path}".endswith(end) and self.used.get(end, 0) < answer.times:
                self.used[end] = self.used.get(end, 0) + 1
                return web.Response(status=answer.status, body=answer.body.encode(), headers=answer.headers)
        return None

    async def _pass_on(self, request: web.Request) -> web.StreamResponse:
        self.seen.append((request.method, request.path, request.headers.get("Range", "")))
        refused = self._broken(request)
        if refused is not None:
            return refused
        headers = {name: value for name, value in request.headers.items() if name.lower() not in _SKIPPED}
        url = f"{self.upstream}{request.raw_path}"
        async with (
            aiohttp.ClientSession(auto_decompress=False) as session,
            session.request(
                request.method,
                URL(url, encoded=True),
                headers=headers,
                data=await request.read(),
                allow_redirects=False,
            ) as answer,
        ):
            data = await answer.read()
            kept = {name: value for name, value in answer.headers.items() if name.lower() not in _SKIPPED}
            return await self._send(request, answer.status, kept, data)

    async def _send(
        self, request: web.Request, status: int, headers: dict[str, str], data: bytes
    ) -> web.StreamResponse:
        if request.method != "GET" or status not in (200, 206):
            return web.Response(status=status, body=data, headers=_for(request, headers, data))
        if any(request.path.endswith(end) for end in self.damaged):
            data = data[:-1] + bytes([data[-1] ^ 1])
        response = web.StreamResponse(status=status, headers={**headers, "Content-Length": str(len(data))})
        await response.prepare(request)
        stall = _once(self.stall_after, request.path)
        if stall is not None:
            await response.write(data[:stall])
            await asyncio.Event().wait()
        cut = _once(self.cut, request.path)
        await response.write(data if cut is None else data[:cut])
        if cut is not None and request.transport is not None:
            request.transport.abort()
        return response


def _once(faults: dict[str, int], path: str) -> int | None:
    end = next((end for end in faults if path.endswith(end)), None)
    return None if end is None else faults.pop(end)


def _for(request: web.Request, headers: dict[str, str], data: bytes) -> dict[str, str]:
    # The answer to HEAD describes a body that is not sent.
    return headers if request.method == "HEAD" else {k: v for k, v in headers.items() if k.lower() != "content-length"}
