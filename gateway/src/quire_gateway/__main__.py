"""``quire-gateway``: reads its configuration, joins the parts, runs until SIGTERM, drains.

The only module that knows all others.
"""

import asyncio
import logging
import os
import signal
import socket
import sys
import time
from collections.abc import Sequence
from contextlib import AsyncExitStack
from time import monotonic

import aiohttp
from aiohttp import web

from quire_gateway.app import Site, build_app
from quire_gateway.config import Config, FileSource, parse_config
from quire_gateway.endpoints import Discovery, Snapshot
from quire_gateway.endpoints.file import FileDiscovery
from quire_gateway.endpoints.kubernetes import KubernetesDiscovery
from quire_gateway.endpoints.kubernetes_access import access_of
from quire_gateway.errors import ConfigProblem
from quire_gateway.fleet import Fleet
from quire_gateway.holding import Holding
from quire_gateway.keys import KeyFile
from quire_gateway.logs import set_up_logging
from quire_gateway.metrics import Metrics
from quire_gateway.proxy import Proxy, tracing
from quire_gateway.scrape import Scraper
from quire_gateway.tls import Tls

# Below the five seconds after which uvicorn drops an idle connection, so that a request seldom meets a closed one.
_KEEPALIVE_SECONDS = 4.0
_CUT_SECONDS = 2.0
_UNCONFIRMED_MILLISECONDS = 30_000

_log = logging.getLogger("quire_gateway")


class Gateway:
    """All parts together, started and stopped as one; tests run it in their own event loop."""

    def __init__(self, config: Config, discovery: Discovery) -> None:
        self._config, self._discovery = config, discovery
        self._stack = AsyncExitStack()
        self.fleet = Fleet(on_gone=lambda backend: self.metrics.forget(backend))
        self.metrics = Metrics(self.fleet)
        self.site = Site(fleet=self.fleet, metrics=self.metrics)
        self._told: dict[str, int] | None = None

    async def start(self) -> int:
        """Listen; returns the port. Raises ``ConfigProblem`` where the address or a file can't be had."""
        tls = None if self._config.tls is None else Tls(self._config.tls, monotonic)
        keys = None if self._config.api_key_file is None else KeyFile(self._config.api_key_file, monotonic)
        session = await self._stack.enter_async_context(_session())
        options = self._config.proxy
        holding = Holding(self.fleet, options, self.metrics)
        self.proxy = Proxy(fleet=self.fleet, session=session, options=options, metrics=self.metrics, holding=holding)
        app = build_app(
            fleet=self.fleet,
            site=self.site,
            proxy=self.proxy,
            metrics=self.metrics,
            max_body_bytes=options.max_body_bytes,
            hold_timeout_seconds=options.hold_timeout_seconds,
            keys=keys,
        )
        runner = web.AppRunner(app, handler_cancellation=True, access_log=None, shutdown_timeout=_CUT_SECONDS)
        await runner.setup()
        self._stack.push_async_callback(runner.cleanup)
        context = None if tls is None else tls.listener_context
        self._site = web.TCPSite(runner, self._config.host, self._config.port, backlog=1024, ssl_context=context)
        try:
            await self._site.start()
        except OSError as error:
            await self._stack.aclose()
            address = f"{self._config.host}:{self._config.port}"
            raise ConfigProblem([f"can't listen on {address}: {os.strerror(error.errno or 0)}"]) from error
        self._scraper = Scraper(self.fleet, session)
        self._tasks = [
            asyncio.create_task(self._discovery.run(self._publish), name="discovery"),
            asyncio.create_task(self._scraper.run(), name="scrape"),
        ]
        for task in self._tasks:
            task.add_done_callback(_die_loudly)
        return int(runner.addresses[0][1])

    async def stop(self) -> None:
        """Not ready at once, no new connections, finish what runs, cut what is left when the time is up."""
        self.site.draining = True
        await self._site.stop()
        running = self.proxy.running
        deadline = monotonic() + self._config.drain_timeout_seconds
        if running:
            _log.info("draining %d requests for at most %g s", len(running), self._config.drain_timeout_seconds)
        # Connections that are open may bring more; each answer closes its own.
        while running and (left := deadline - monotonic()) > 0:
            await asyncio.wait(set(running), timeout=left)
        if running:
            _log.warning("cutting %d requests: the drain time is over", len(running))
            self.proxy.cutting = True
            cut = set(running)
            for request in cut:
                request.cancel()
            await asyncio.wait(cut, timeout=_CUT_SECONDS)
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._stack.aclose()

    def _publish(self, snapshot: Snapshot) -> None:
        self.fleet.publish(snapshot, now=int(time.time()))
        self._scraper.hurry()
        ready = {name: sum(b.is_ready for b in pool.backends.values()) for name, pool in self.fleet.pools.items()}
        if ready != self._told:
            self._told = ready
            words = ", ".join(f"{name} {count}" for name, count in ready.items())
            _log.info("replicas ready: %s", words or "no models")


def main(argv: Sequence[str] | None = None) -> int:
    """The command. 0 after a drain, 2 for a mistake in the command line."""
    try:
        config = parse_config(sys.argv[1:] if argv is None else argv, os.environ)
        set_up_logging(config.log_level)
        asyncio.run(_run(config))  # asyncio's own loop, not uvloop's: ADR 0056
    except ConfigProblem as error:
        print(
            "quire-gateway: can't start:", *(f"  - {problem}" for problem in error.problems), sep="\n", file=sys.stderr
        )
        print("quire-gateway --help lists the options.", file=sys.stderr)
        return 2
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
            # Whoever asks twice wants out.
            loop.add_signal_handler(number, os._exit, 1)
        await gateway.stop()


async def _discovery(config: Config, stack: AsyncExitStack) -> Discovery:
    if isinstance(config.source, FileSource):
        return FileDiscovery(config.source.path)
    access = access_of(config.source.kubeconfig)
    session = await stack.enter_async_context(access.session())
    return KubernetesDiscovery(access, session, namespaces=config.source.namespaces)


def _session() -> aiohttp.ClientSession:
    """The connections to replicas: no limits, cookies, proxies, decompression or deadlines of its own."""
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
    """A replica whose machine vanished is noticed in half a minute, though nothing is sent to it, and also when it has
    not confirmed what was sent: then nothing is probed, and it would be sent again for a quarter of an hour."""
    sock = socket.socket(family=address[0], type=address[1], proto=address[2])
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    if sys.platform == "linux":
        for option, value in ((socket.TCP_KEEPIDLE, 15), (socket.TCP_KEEPINTVL, 5), (socket.TCP_KEEPCNT, 3)):
            sock.setsockopt(socket.IPPROTO_TCP, option, value)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, _UNCONFIRMED_MILLISECONDS)
    return sock


def _die_loudly(task: "asyncio.Task[None]") -> None:
    """Discovery and scraping outlive every error they know; any other must not leave a gateway that is blind."""
    if not task.cancelled() and task.exception() is not None:
        _log.critical("%s failed", task.get_name(), exc_info=task.exception())
        os._exit(1)


if __name__ == "__main__":
    sys.exit(main())
