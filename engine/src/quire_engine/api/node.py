"""The HTTP server of a node other than node 0 of a group: probes and metrics, and no API.

The node is ready when it has joined its group and the group runs. Requests go to node 0.
"""

import asyncio
import logging
import signal
import socket
import time
from contextlib import suppress

import uvicorn
import uvloop
from prometheus_client import CollectorRegistry, Gauge, ProcessCollector, generate_latest
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp

from quire_engine import __version__, logs
from quire_engine.api.http_server import BoundedHttpProtocol
from quire_engine.api.serve import UvicornServer
from quire_engine.config import EngineConfig
from quire_engine.cpu.choice import CpuChoice, log_choice
from quire_engine.ipc.client import EngineClient
from quire_engine.ipc.process import Spawned

_log = logging.getLogger(__name__)
_SHUTDOWN_SECONDS = 5


def create_node_app(engine: EngineClient, node_rank: int) -> ASGIApp:
    """Return the application: /livez, /readyz and its other names, /metrics and /version."""
    registry = CollectorRegistry()
    ProcessCollector(registry=registry)
    joined = Gauge("quire_node_joined", "1 while this node is in a running group.", registry=registry)
    joined.set_function(lambda: float(engine.ready is not None))
    restarts = Gauge("quire_engine_restarts_total", "Number of groups that this node has lost.", registry=registry)
    restarts.set_function(lambda: float(engine.restarts))

    async def livez(request: Request) -> Response:
        if engine.failure is not None:
            return JSONResponse({"status": "failed", "reason": engine.failure}, status_code=503)
        return JSONResponse({"status": "live"})

    async def readyz(request: Request) -> Response:
        state = "ready" if engine.ready is not None else engine.state
        return JSONResponse({"status": state, "node_rank": node_rank}, status_code=200 if state == "ready" else 503)

    async def metrics(request: Request) -> Response:
        return Response(generate_latest(registry), headers={"content-type": CONTENT_TYPE_PLAIN_0_0_4})

    async def version(request: Request) -> Response:
        limits = engine.cpu
        return JSONResponse({"version": __version__, "cpu": None if limits is None else limits.as_json()})

    async def elsewhere(request: Request) -> Response:
        message = f"this is node {node_rank} of a group: node 0 serves the API"
        error = {"message": message, "type": "invalid_request_error", "param": None, "code": "not_node_0"}
        return JSONResponse({"error": error}, status_code=404)

    routes = [Route("/livez", livez), Route("/metrics", metrics), Route("/version", version)]
    routes += [Route(path, readyz) for path in ("/readyz", "/health", "/healthz")]
    routes.append(Route("/{path:path}", elsewhere, methods=["GET", "POST", "PUT", "PATCH", "DELETE"]))
    return Starlette(routes=routes)


def serve_node(
    config: EngineConfig, listener: socket.socket, *, spawned: Spawned, cpu: CpuChoice | None, began: float
) -> int:
    """Serve until a signal arrives, and return the exit status. Raise EngineStartError if no group forms at first."""
    logs.set_up(config.log)
    log_choice(cpu)
    try:
        with listener:
            return uvloop.run(_run(config, listener, spawned, cpu, began))
    finally:
        if config.server.uds is not None:
            config.server.uds.unlink(missing_ok=True)


async def _run(
    config: EngineConfig, listener: socket.socket, spawned: Spawned, cpu: CpuChoice | None, began: float
) -> int:
    engine = EngineClient(config, spawned=spawned, cpu=cpu)
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    http = UvicornServer(
        uvicorn.Config(
            create_node_app(engine, config.parallel.node_rank),
            http=BoundedHttpProtocol,
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            server_header=False,
            proxy_headers=False,
            timeout_graceful_shutdown=_SHUTDOWN_SECONDS,
        )
    )
    serving = asyncio.create_task(http.serve([listener]), name="http")
    starting = asyncio.create_task(engine.start(), name="engine start")
    stopping = asyncio.create_task(stop.wait(), name="stop")
    try:
        await asyncio.wait({serving, starting, stopping}, return_when=asyncio.FIRST_COMPLETED)
        if starting.done():
            starting.result()  # raises EngineStartError where there is no group
            _log.info("ready: node %d is in its group, %.1f s", config.parallel.node_rank, time.monotonic() - began)
            await asyncio.wait({serving, stopping}, return_when=asyncio.FIRST_COMPLETED)
        return 0
    finally:
        http.should_exit = True
        for task in (starting, stopping):
            task.cancel()
            with suppress(asyncio.CancelledError, Exception):
                await task
        await engine.close()
        await asyncio.wait({serving}, timeout=_SHUTDOWN_SECONDS)
