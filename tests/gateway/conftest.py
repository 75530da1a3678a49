"""A gateway on loopback, and replicas whose behaviour a test chooses."""

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from aiohttp import web
from multidict import CIMultiDict

from quire_common.contract.adapters_file import (
    ADAPTERS_PATH,
    AdapterReport,
    AdaptersReport,
    AdapterState,
    Slots,
    render_report,
)
from quire_common.contract.gateway import (
    STABLE,
    CanaryRoute,
    Endpoint,
    HoldPolicy,
    ModelEndpoints,
)
from quire_common.tls import TlsFiles
from quire_gateway.__main__ import Gateway
from quire_gateway.config import Config, FileSource, ProxyOptions
from quire_gateway.endpoints import Publish

Behaviour = Callable[[web.Request], Awaitable[web.StreamResponse]]

LOAD = """\
vllm:num_requests_running{{model_name="chat",engine="0"}} {running}
vllm:num_requests_waiting{{model_name="chat",engine="0"}} {waiting}
vllm:kv_cache_usage_perc{{model_name="chat",engine="0"}} {kv_usage}
vllm:request_success_total{{model_name="chat",engine="0",finished_reason="stop"}} {finished}
"""


class Replica:
    """An engine's address with a programmed behaviour."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.behaviour: Behaviour = self.say_name
        self.bodies: list[dict[str, object]] = []
        self.headers: list[CIMultiDict[str]] = []
        self.arrived = asyncio.Event()
        self.left = asyncio.Event()
        """Set when a client leaves before its answer ended."""
        self.load = {"running": 0, "waiting": 0, "kv_usage": 0, "finished": 0}
        self.told: dict[str, float] = {}
        """Additional series of its metrics page, by name."""
        self.adapters: dict[str, AdapterState] = {}
        """The states of its adapters, by name."""
        self.scraped = asyncio.Event()
        self.answers_scrapes = asyncio.Event()
        self.answers_scrapes.set()
        self._runner: web.AppRunner | None = None
        self.port = 0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def endpoint(
        self, *, ready: bool = True, terminating: bool = False, starting: bool = False, track: str = STABLE
    ) -> Endpoint:
        return Endpoint(
            id=self.name,
            url=self.url,
            ready=ready,
            serving=ready,
            terminating=terminating,
            starting=starting,
            track=track,
        )

    async def start(self) -> None:
        app = web.Application(client_max_size=2**26)
        app.router.add_get("/metrics", self._metrics)
        app.router.add_get(ADAPTERS_PATH, self._adapters)
        app.router.add_route("*", "/{path:.*}", self._serve)
        self._runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.1)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", self.port)
        await site.start()
        self.port = self._runner.addresses[0][1]

    async def stop(self) -> None:
        if self._runner is not None:
            await self._runner.cleanup()
            self._runner = None

    async def say_name(self, request: web.Request) -> web.StreamResponse:
        return web.json_response({"object": "text_completion", "served_by": self.name})

    def answer_after(self, released: asyncio.Event) -> None:
        """Let requests wait until ``released`` is set."""

        async def wait(request: web.Request) -> web.StreamResponse:
            await released.wait()
            return await self.say_name(request)

        self.behaviour = wait

    def refuse(self, status: int, code: str | None = None, **headers: str) -> None:
        """Answer each request with this error."""
        error = {"error": {"message": "no", "code": code}}

        async def refusal(request: web.Request) -> web.StreamResponse:
            return web.json_response(error, status=status, headers=headers)

        self.behaviour = refusal

    def break_after(self, data: bytes, content_type: str = "text/event-stream") -> None:
        """Let answers consist of ``data`` and the end of the connection."""

        async def break_off(request: web.Request) -> web.StreamResponse:
            response = web.StreamResponse(headers={"Content-Type": content_type})
            await response.prepare(request)
            await response.write(data)
            await asyncio.sleep(0)
            assert request.transport is not None
            request.transport.abort()
            return response

        self.behaviour = break_off

    async def _serve(self, request: web.Request) -> web.StreamResponse:
        self.bodies.append(json.loads(await request.read() or b"{}"))
        self.headers.append(request.headers.copy())
        self.arrived.set()
        try:
            return await self.behaviour(request)
        except (asyncio.CancelledError, ConnectionResetError):
            self.left.set()
            raise

    async def _metrics(self, request: web.Request) -> web.Response:
        self.scraped.set()
        await self.answers_scrapes.wait()
        return web.Response(text=LOAD.format(**self.load) + "".join(f"{n} {v}\n" for n, v in self.told.items()))

    async def _adapters(self, request: web.Request) -> web.Response:
        found = [AdapterReport(name=name, generation=1, state=state) for name, state in self.adapters.items()]
        report = AdaptersReport(adapters=found, slots=Slots(total=4, used=0), loads_total=0)
        return web.json_response(render_report(report))


class PushedDiscovery:
    """A discovery that publishes what a test pushes."""

    num_gateways = 1

    def __init__(self) -> None:
        self.hold = HoldPolicy()
        self.canary: CanaryRoute | None = None
        """The Services of models, by name."""
        self._publish: Publish | None = None

    async def run(self, publish: Publish) -> None:
        self._publish = publish
        await asyncio.Event().wait()

    async def push(self, adapters: Mapping[str, str] | None = None, **models: list[Endpoint]) -> None:
        """Publish the replicas of models; ``adapters`` are the models of adapters, by name."""
        while self._publish is None:
            await asyncio.sleep(0)
        found = {
            name: ModelEndpoints(
                name=name,
                endpoints=tuple(endpoints),
                hold=self.hold,
                canary=self.canary,
            )
            for name, endpoints in models.items()
        }
        for name, model in (adapters or {}).items():
            found[name] = ModelEndpoints(
                name=name,
                endpoints=tuple(models[model]),
                hold=self.hold,
                adapter_of=model,
            )
        self._publish(found)


class Harness:
    """A running gateway with its discovery and a client."""

    def __init__(self, gateway: Gateway, discovery: PushedDiscovery, client: aiohttp.ClientSession, port: int) -> None:
        self.gateway, self.discovery, self.client, self.port = gateway, discovery, client, port
        self.url = f"http://127.0.0.1:{port}"
        self.push = discovery.push

    async def push_and_scrape(self, **models: list[Endpoint]) -> None:
        """Publish the replicas of models, and wait until the load of each is known."""
        await self.push(**models)
        while any(backend.load is None for backend in self.gateway.fleet.backends()):
            await asyncio.sleep(0.01)

    async def until_held(self, count: int, model: str = "chat") -> None:
        """Wait until so many requests of a model are held."""
        while self.gateway.metrics.held.get(model, 0) != count:
            await asyncio.sleep(0.005)

    async def page(self, path: str) -> Any:
        """Return the JSON of a page."""
        async with self.client.get(f"{self.url}{path}") as response:
            assert response.status == 200
            return await response.json()

    async def complete(self, model: str = "chat", **extra: object) -> tuple[int, dict[str, object]]:
        """Send a completion and return status and parsed body."""
        async with self.client.post(f"{self.url}/v1/completions", json={"model": model, **extra}) as response:
            return response.status, await response.json()

    async def metric(self, name: str, **labels: str) -> float:
        """Return the sum of the series with that name and these labels."""
        from prometheus_client.parser import text_string_to_metric_families

        async with self.client.get(f"{self.url}/metrics") as response:
            page = await response.text()
        samples = [s for family in text_string_to_metric_families(page) for s in family.samples if s.name == name]
        return sum(s.value for s in samples if labels.items() <= s.labels.items())


Start = Callable[..., Awaitable[Harness]]


@pytest.fixture
async def replicas() -> AsyncIterator[Callable[[str], Awaitable[Replica]]]:
    """Yield a function that starts replicas by name."""
    started: list[Replica] = []

    async def start(name: str) -> Replica:
        replica = Replica(name)
        await replica.start()
        started.append(replica)
        return replica

    yield start
    await asyncio.gather(*(replica.stop() for replica in started))


@pytest.fixture
async def start_gateway(tmp_path) -> AsyncIterator[Start]:
    """Yield a function that starts gateways with the given proxy options; all are stopped at the end."""
    running: list[Harness] = []

    async def start(
        *,
        drain_timeout_seconds: float = 5.0,
        tls: TlsFiles | None = None,
        api_key_file: Path | None = None,
        max_connections: int = 100,
        num_gateways: int | None = 1,
        **options: object,
    ) -> Harness:
        defaults = {
            "max_body_bytes": 2**24,
            "body_memory_bytes": 2**26,
            "hold_limit": 10,
            "hold_timeout_seconds": 5.0,
            "max_attempts": 3,
        }
        config = Config(
            host="127.0.0.1",
            port=0,
            source=FileSource(path=tmp_path / "unused"),
            proxy=ProxyOptions(**{**defaults, **options}),
            drain_timeout_seconds=drain_timeout_seconds,
            log_level="info",
            tls=tls,
            api_key_file=api_key_file,
            max_connections=max_connections,
            num_gateways=num_gateways,
        )
        discovery = PushedDiscovery()
        gateway = Gateway(config, discovery)
        port = await gateway.start()
        harness = Harness(gateway, discovery, aiohttp.ClientSession(), port)
        running.append(harness)
        return harness

    yield start
    for harness in running:
        await harness.client.close()
        if not harness.gateway.site.draining:
            await harness.gateway.stop()


@pytest.fixture
async def gateway(start_gateway: Start) -> Harness:
    """Return a gateway with short defaults."""
    return await start_gateway()


@pytest.fixture
async def chat(gateway: Harness, replicas: Callable[[str], Awaitable[Replica]]) -> Replica:
    """Return the only replica of the model chat, which the gateway knows."""
    replica = await replicas("chat-0")
    await gateway.push(chat=[replica.endpoint()])
    return replica
