"""``quire-gateway``: read the configuration, connect the parts, run until SIGTERM, drain.

This is the only module that imports all others.
"""

import asyncio
import gc
import logging
import os
import shutil
import signal
import socket
import ssl
import sys
import time
from collections.abc import Sequence
from contextlib import AsyncExitStack
from time import monotonic

import aiohttp
from aiohttp import web

from quire_common.errors import ConfigurationError
from quire_common.key_file import KeyFile
from quire_common.logs import set_up_logging
from quire_common.tls import ReloadingTls
from quire_gateway import __version__
from quire_gateway.app import Site, build_app
from quire_gateway.attempt import tracing
from quire_gateway.bodies import BodyMemory
from quire_gateway.config import FLAGS, Config, FileSource, KubernetesSource, parse_config
from quire_gateway.connections import Connections
from quire_gateway.endpoints import Discovery, Snapshot
from quire_gateway.endpoints.file import FileDiscovery
from quire_gateway.endpoints.kubernetes import KubernetesDiscovery, access_of
from quire_gateway.fleet import Fleet
from quire_gateway.hold_queue import HoldQueue
from quire_gateway.limits import gateway_allowances
from quire_gateway.metrics import Metrics
from quire_gateway.proxy import Proxy
from quire_gateway.scrape import Scraper

# Below the five seconds after which uvicorn closes an idle connection, so that a request seldom meets a closed one.
_KEEPALIVE_SECONDS = 4.0
_CANCEL_SECONDS = 2.0
_UNACKNOWLEDGED_MILLISECONDS = 30_000

_log = logging.getLogger("quire_gateway")


class Gateway:
    """A whole gateway, started and stopped as one; tests run it in their own event loop."""

    def __init__(self, config: Config, discovery: Discovery) -> None:
        self._config, self._discovery = config, discovery
        self._stack = AsyncExitStack()
        self.fleet = Fleet(
            on_gone=lambda backend: self.metrics.forget(backend), on_wake=lambda pool: self._queue.release(pool)
        )
        self.body_memory = BodyMemory(config.proxy.body_memory_bytes)
        self.metrics = Metrics(self.fleet, self.body_memory)
        self._queue = HoldQueue(self.fleet, config.proxy, self.metrics)
        self.site = Site(fleet=self.fleet, metrics=self.metrics, hides_names=config.proxy.hides_names)
        self._logged: dict[str, int] | None = None

    async def start(self) -> int:
        """Listen, and return the port. Raise ``ConfigurationError`` if the address or a file cannot be used."""
        tls = None if self._config.tls is None else ReloadingTls(self._config.tls, monotonic)
        keys = self._keys()
        session = await self._stack.enter_async_context(_session())
        options = self._config.proxy
        self.proxy = Proxy(
            fleet=self.fleet,
            session=session,
            options=options,
            metrics=self.metrics,
            queue=self._queue,
            memory=self.body_memory,
            limits=gateway_allowances(monotonic, self._num_gateways),
        )
        app = build_app(
            fleet=self.fleet,
            site=self.site,
            proxy=self.proxy,
            metrics=self.metrics,
            hold_timeout_seconds=options.hold_timeout_seconds,
            keys=keys,
        )
        runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=_CANCEL_SECONDS)
        await runner.setup()
        self._stack.push_async_callback(runner.cleanup)
        assert runner.server is not None
        self.connections = Connections(runner.server, limit=self._config.max_connections)
        context = None if tls is None else tls.listener_context
        self._listener = await self._listen(context)
        self._scraper = Scraper(self.fleet, session)
        self._tasks = [
            asyncio.create_task(self._discovery.run(self._publish), name="discovery"),
            asyncio.create_task(self._scraper.run(), name="scrape"),
        ]
        for task in self._tasks:
            task.add_done_callback(_exit_on_failure)
        return int(self._listener.sockets[0].getsockname()[1])

    async def _listen(self, context: ssl.SSLContext | None) -> asyncio.Server:
        host, port = self._config.host, self._config.port
        try:
            return await asyncio.get_running_loop().create_server(
                self.connections, host, port, backlog=1024, ssl=context
            )
        except OSError as error:
            await self._stack.aclose()
            address = f"{host}:{port}"
            raise ConfigurationError(f"cannot listen on {address}: {os.strerror(error.errno or 0)}") from error

    async def stop(self) -> None:
        """Stop: turn unready, accept no connections, finish running requests, cancel the rest when the time is up."""
        self.site.draining = True
        self._listener.close()
        running = self.proxy.running
        deadline = monotonic() + self._config.drain_timeout_seconds
        if running:
            _log.info("draining: %d requests, at most %g s", len(running), self._config.drain_timeout_seconds)
        # Open connections may bring more requests; each answer closes its connection.
        while running and (left := deadline - monotonic()) > 0:
            await asyncio.wait(set(running), timeout=left)
        if running:
            _log.warning("drain timeout: cancelling %d requests", len(running))
            self.proxy.cancel()
            await asyncio.wait(set(running), timeout=_CANCEL_SECONDS)
        await self.proxy.comparisons.aclose()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._stack.aclose()

    def _keys(self) -> KeyFile | None:
        """Return the API keys. Limits that this gateway could not honour are refused."""
        if self._config.api_key_file is None:
            return None
        source = self._config.source
        is_counted = isinstance(source, KubernetesSource) and source.gateway_service is not None
        reason = (
            None
            if is_counted or self._config.num_gateways is not None
            else "keys have limits, which all gateways share: set --gateway-service or --gateways"
        )
        return KeyFile(self._config.api_key_file, monotonic, no_limits=reason)

    def _num_gateways(self) -> int:
        return self._config.num_gateways or max(1, self._discovery.num_gateways)

    def _publish(self, snapshot: Snapshot) -> None:
        self.fleet.publish(snapshot, now=int(time.time()))
        self._scraper.scrape_now()
        ready = {name: sum(b.is_ready for b in pool.backends.values()) for name, pool in self.fleet.pools.items()}
        if ready != self._logged:
            self._logged = ready
            _log.info(
                "ready replicas: %s", ", ".join(f"{name} {count}" for name, count in ready.items()) or "no models"
            )


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command. Return 0 after a drain, 2 for an error in the configuration."""
    argv = sys.argv[1:] if argv is None else argv
    if "--help" in argv or "-h" in argv:
        print(FLAGS.help_text(shutil.get_terminal_size((100, 24)).columns), end="")
        return 0
    if "--version" in argv:
        print(f"quire-gateway {__version__}")
        return 0
    try:
        config = parse_config(argv, os.environ)
        set_up_logging(config.log_level)
        # What is loaded stays: the collector need not look through it while requests wait.
        gc.collect()
        gc.freeze()
        asyncio.run(_run(config))  # asyncio's own loop, not uvloop's: ADR 0056
    except ConfigurationError as error:
        problems = "\n".join(f"  - {problem}" for problem in error.problems)
        print(f"quire-gateway cannot start:\n{problems}\nquire-gateway --help lists the flags.", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        return 130
    return 0


async def _run(config: Config) -> None:
    async with AsyncExitStack() as stack:
        gateway = Gateway(config, await _discovery(config, stack))
        port = await gateway.start()
        _log.info("listening on %s://%s:%d", "http" if config.tls is None else "https", config.host, port)
        stop = asyncio.Event()
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, stop.set)
        await stop.wait()
        for number in (signal.SIGTERM, signal.SIGINT):
            # A second signal ends the process at once.
            loop.add_signal_handler(number, os._exit, 1)
        await gateway.stop()


async def _discovery(config: Config, stack: AsyncExitStack) -> Discovery:
    if isinstance(config.source, FileSource):
        return FileDiscovery(config.source.path)
    access = access_of(config.source.kubeconfig)
    session = await stack.enter_async_context(access.session())
    source = config.source
    return KubernetesDiscovery(
        access,
        session,
        namespaces=source.namespaces,
        scope=source.scope,
        gateway_service=source.gateway_service,
    )


def _session() -> aiohttp.ClientSession:
    """Return a session to the replicas, without limits, cookies, proxies, decompression or deadlines of its own."""
    connector = aiohttp.TCPConnector(
        limit=0,
        keepalive_timeout=_KEEPALIVE_SECONDS,
        happy_eyeballs_delay=None,
        socket_factory=_socket,
    )
    return aiohttp.ClientSession(
        connector=connector,
        cookie_jar=aiohttp.DummyCookieJar(),
        auto_decompress=False,
        timeout=aiohttp.ClientTimeout(total=None, sock_connect=5.0),
        trust_env=False,
        trace_configs=[tracing()],
        skip_auto_headers=("User-Agent", "Accept", "Accept-Encoding", "Content-Type"),
    )


def _socket(address: aiohttp.AddrInfoType) -> socket.socket:
    """Return a socket that notices within half a minute that a replica's machine is gone.

    Keep-alive probes notice it on an idle connection. While sent data is not acknowledged there are no probes, and the
    kernel would retransmit for a quarter of an hour; TCP_USER_TIMEOUT ends that.
    """
    sock = socket.socket(family=address[0], type=address[1], proto=address[2])
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    if sys.platform == "linux":
        for option, value in ((socket.TCP_KEEPIDLE, 15), (socket.TCP_KEEPINTVL, 5), (socket.TCP_KEEPCNT, 3)):
            sock.setsockopt(socket.IPPROTO_TCP, option, value)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, _UNACKNOWLEDGED_MILLISECONDS)
    return sock


def _exit_on_failure(task: "asyncio.Task[None]") -> None:
    """End the process when discovery or scraping fails unexpectedly: a gateway must not run without them."""
    if not task.cancelled() and task.exception() is not None:
        _log.critical("background task failed: %s", task.get_name(), exc_info=task.exception())
        os._exit(1)


if __name__ == "__main__":
    sys.exit(main())
