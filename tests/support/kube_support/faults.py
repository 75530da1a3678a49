"""A proxy on loopback between an operator and the API server with programmed faults, which also counts requests.

It serves plain HTTP to the operator and uses its kubeconfig towards the server. It runs in its own thread, because
tests wait with ordinary sleeps.
"""

import asyncio
import json
import re
import ssl
import threading
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import aiohttp
from aiohttp import web

from quire_cluster.control_plane import ControlPlane

HOP_BY_HOP: Final = frozenset(
    {"connection", "keep-alive", "transfer-encoding", "content-length", "content-encoding", "host"}
)


@dataclass(slots=True)
class Fault:
    """A fault of the next `times` requests of this method whose path matches."""

    method: str
    path: str
    times: int
    status: int = 0
    """0 means never to answer."""
    headers: dict[str, str] = field(default_factory=dict)
    user_agent: str = ""
    """A part of it."""
    cut: bool = False
    """Execute the request, but cut the connection instead of forwarding the answer."""

    def takes(self, request: web.Request) -> bool:
        return self.times > 0 and self.matches(request)

    def matches(self, request: web.Request) -> bool:
        agent = request.headers.get("User-Agent", "")
        return (
            request.method == self.method
            and re.search(self.path, request.path_qs.partition("?")[0]) is not None
            and self.user_agent in agent
        )


class FaultProxy:
    """A proxy that is started and stopped; `faults` may be changed at any time."""

    def __init__(self, server: ControlPlane, kubeconfig: Path) -> None:
        """`kubeconfig` is that of a ServiceAccount; the proxy's own is stored next to it."""
        self._server = server
        self.faults: list[Fault] = []
        self.seen: list[tuple[float, str, str]] = []
        """Time (of the proxy's loop), method and path of each request that a fault matches, also after it was used up.
        """
        self.is_silent = False
        """Nothing passes in either direction, and no connection is closed: a network that drops packets."""
        self._answering: list[web.Request] = []
        self._loop = asyncio.new_event_loop()
        self._stopping = asyncio.Event()
        self._port: asyncio.Future[int] = self._loop.create_future()
        started = threading.Event()
        self._thread = threading.Thread(target=self._run, args=(started,), daemon=True)
        self._thread.start()
        assert started.wait(10)
        document = json.loads(kubeconfig.read_text())
        document["clusters"][0]["cluster"] = {"server": f"http://127.0.0.1:{self._port.result()}"}
        self.kubeconfig = kubeconfig.with_suffix(".proxy")
        self.kubeconfig.write_text(json.dumps(document))

    def cut_streams(self, user_agent: str) -> None:
        """End the answers to this client as if the connection had broken."""
        for request in list(self._answering):
            if user_agent in request.headers.get("User-Agent", "") and request.transport is not None:
                self._loop.call_soon_threadsafe(request.transport.abort)

    def stop(self) -> None:
        self._loop.call_soon_threadsafe(self._stopping.set)
        self._thread.join(10)

    def _run(self, started: threading.Event) -> None:
        # A runner ends the requests that are still being forwarded before it closes the loop.
        with asyncio.Runner(loop_factory=lambda: self._loop) as runner:
            runner.run(self._serve(started))

    async def _serve(self, started: threading.Event) -> None:
        tls = ssl.create_default_context(cafile=str(self._server.server.authority))
        timeout = aiohttp.ClientTimeout(total=None)
        connector = aiohttp.TCPConnector(ssl=tls, limit=0)
        async with aiohttp.ClientSession(connector=connector, timeout=timeout, auto_decompress=False) as session:
            app = web.Application(client_max_size=2**24)

            async def forward(request: web.Request) -> web.StreamResponse:
                self._answering.append(request)
                try:
                    return await self._forward(request, session)
                finally:
                    self._answering = [other for other in self._answering if other is not request]

            app.router.add_route("*", "/{path:.*}", forward)
            runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
            await runner.setup()
            await web.TCPSite(runner, "127.0.0.1", 0).start()
            self._port.set_result(runner.addresses[0][1])
            started.set()
            await self._stopping.wait()
            await runner.cleanup()

    async def _forward(self, request: web.Request, session: aiohttp.ClientSession) -> web.StreamResponse:
        fault = next((fault for fault in self.faults if fault.takes(request)), None)
        if any(fault.matches(request) for fault in self.faults):
            self.seen.append((self._loop.time(), request.method, request.path))
        if fault is not None:
            fault.times -= 1
        if self.is_silent or (fault is not None and fault.status == 0 and not fault.cut):
            await self._stopping.wait()
            raise web.HTTPServiceUnavailable
        if fault is not None and not fault.cut:
            body = {"kind": "Status", "message": f"a fault of the test: {fault.status}", "code": fault.status}
            return web.json_response(body, status=fault.status, headers=fault.headers)
        return await self._pass_on(request, session, cut=fault is not None)

    async def _pass_on(self, request: web.Request, session: aiohttp.ClientSession, *, cut: bool) -> web.StreamResponse:
        headers = {name: value for name, value in request.headers.items() if name.lower() not in HOP_BY_HOP}
        url = f"{self._server.server.url}{request.path_qs}"
        body = await request.read()
        async with session.request(request.method, url, data=body or None, headers=headers) as answer:
            if cut:
                await answer.read()
                _hang_up(request)
            kept = {name: value for name, value in answer.headers.items() if name.lower() not in HOP_BY_HOP}
            response = web.StreamResponse(status=answer.status, headers=kept)
            try:
                await response.prepare(request)
                async for chunk in answer.content.iter_any():
                    while self.is_silent:
                        await asyncio.sleep(0.05)
                    await response.write(chunk)
                await response.write_eof()
            except (aiohttp.ClientError, ConnectionResetError):
                _hang_up(request)  # either side has closed
            return response


def _hang_up(request: web.Request) -> None:
    if request.transport is not None:
        request.transport.abort()
    raise asyncio.CancelledError  # which aiohttp handles like a client that left
