"""The processes under test: a gateway with two keys, and replicas of the demo model with a small KV cache.

A replica whose ``/livez`` fails is started again at the same address, as a kubelet does: an engine that was restarted
five times within ten minutes asks for this.
"""

import asyncio
import json
import os
import sys
from asyncio.subprocess import Process
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import aiohttp
from prometheus_client.parser import text_string_to_metric_families

from benchmarks.report import DEMO_MODEL, ROOT
from benchmarks.serving.comparison.process_tree import free_port
from benchmarks.serving.soak.poisonable import MARK

MODEL = "chat"
KEYS = {"tenant-a": "soak-key-of-tenant-a", "tenant-b": "soak-key-of-tenant-b"}
MAX_MODEL_LEN = 2048
HANG_SECONDS = 5
_KV_CACHE = "8MiB"
"""The keys and values of about 2,700 tokens in bfloat16: less than what a third of 40 clients needs."""
_START_SECONDS = 600
_STOP_SECONDS = 20
_POLL_SECONDS = 0.5


@dataclass
class Server:
    """A server process at a fixed address, and its log."""

    name: str
    command: list[str]
    port: int
    log: Path
    process: Process | None = None
    environment: Mapping[str, str] = field(default_factory=dict)
    """Variables in addition to those of this process. ``PYTHONPATH`` comes before the path of this process."""

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def pid(self) -> int:
        assert self.process is not None
        return self.process.pid

    async def start(self) -> None:
        # The whole path: the packages under test are those of this process.
        first = filter(None, [self.environment.get("PYTHONPATH")])
        path = os.pathsep.join([*first, str(ROOT), *sys.path])
        environment = {**os.environ, **self.environment, "PYTHONPATH": path}
        with self.log.open("ab") as file:
            self.process = await asyncio.create_subprocess_exec(
                sys.executable, *self.command, stdout=file, stderr=file, env=environment, cwd=ROOT
            )

    async def stop(self) -> None:
        if self.process is None or self.process.returncode is not None:
            return
        self.process.terminate()
        try:
            await asyncio.wait_for(self.process.wait(), _STOP_SECONDS)
        except TimeoutError:
            self.process.kill()
            await self.process.wait()

    async def kill(self) -> None:
        """End the process without a shutdown."""
        assert self.process is not None
        self.process.kill()
        await self.process.wait()

    async def until_ready(self, client: aiohttp.ClientSession) -> None:
        """Wait until ``/readyz`` answers 200. Raise SystemExit if the process ends or takes too long."""
        try:
            async with asyncio.timeout(_START_SECONDS):
                while await status(client, f"{self.url}/readyz") != 200:
                    if self.process is None or self.process.returncode is not None:
                        raise SystemExit(f"{self.name} ended; its log: {self.log}")
                    await asyncio.sleep(0.1)
        except TimeoutError:
            raise SystemExit(f"{self.name} was not ready within {_START_SECONDS} s; its log: {self.log}") from None


@dataclass(frozen=True, kw_only=True)
class Death:
    """A poisonous request in an engine process."""

    replica: str
    seconds: float
    """The time since the start of the soak, within half a second."""


@dataclass
class Fleet:
    """The gateway and its replicas."""

    folder: Path
    num_replicas: int
    gateway: Server = field(init=False)
    replicas: list[Server] = field(init=False)
    deaths: list[Death] = field(default_factory=list)
    num_server_restarts: int = 0
    counters: Counter[str] = field(default_factory=Counter)
    """Counters of servers that were started again."""

    def __post_init__(self) -> None:
        keys, endpoints = self.folder / "keys", self.folder / "endpoints.json"
        keys.write_text("".join(f"name={name} {key}\n" for name, key in KEYS.items()))
        self.replicas = [self._replica(f"chat-{number}", keys) for number in range(self.num_replicas)]
        listed = [{"id": replica.name, "url": replica.url, "ready": True} for replica in self.replicas]
        endpoints.write_text(json.dumps({"models": [{"name": MODEL, "endpoints": listed}]}))
        port = free_port()
        command = ["-m", "quire_gateway", "--host", "127.0.0.1", "--port", str(port), "--drain-timeout", "2s"]
        command += ["--endpoints-file", str(endpoints), "--api-key-file", str(keys)]
        self.gateway = Server("gateway", command, port, self.folder / "gateway.log")

    def _replica(self, name: str, keys: Path) -> Server:
        port = free_port()
        command = ["-m", "benchmarks.serving.soak.poisonable", "--model", str(DEMO_MODEL), "--served-model-name", MODEL]
        command += ["--host", "127.0.0.1", "--port", str(port), "--api-key-file", str(keys), "--drain-timeout", "2s"]
        command += ["--dtype", "bfloat16", "--threads", "1", "--kv-cache-memory-bytes", _KV_CACHE]
        command += ["--max-model-len", str(MAX_MODEL_LEN), "--max-queued-tokens", "1000000", "--check-integrity"]
        command += ["--scheduling-policy", "fair", "--engine-hang-timeout", f"{HANG_SECONDS}s"]
        return Server(name, command, port, self.folder / f"{name}.log")

    @property
    def servers(self) -> list[Server]:
        return [self.gateway, *self.replicas]

    async def start(self, client: aiohttp.ClientSession) -> None:
        """Start every server. The first replica compiles kernels that are not cached yet, the others then find them."""
        first, *others = self.replicas
        await first.start()
        await first.until_ready(client)
        for server in (*others, self.gateway):
            await server.start()
        for server in (*others, self.gateway):
            await server.until_ready(client)

    async def stop(self) -> None:
        await asyncio.gather(*(server.stop() for server in self.servers))

    async def supervise(self, client: aiohttp.ClientSession, began: float) -> None:
        """Record deaths of engine processes, and start servers again whose ``/livez`` fails, until cancelled."""
        loop = asyncio.get_running_loop()
        while True:
            for replica in self.replicas:
                known = sum(death.replica == replica.name for death in self.deaths)
                for _ in range(replica.log.read_text(errors="replace").count(MARK) - known):
                    self.deaths.append(Death(replica=replica.name, seconds=loop.time() - began))
                if await status(client, f"{replica.url}/livez") == 503:
                    self.counters += await counters(client, replica)
                    await replica.stop()
                    await replica.start()
                    self.num_server_restarts += 1
            await asyncio.sleep(_POLL_SECONDS)

    async def all_ready(self, client: aiohttp.ClientSession) -> bool:
        return all([await status(client, f"{replica.url}/readyz") == 200 for replica in self.replicas])


async def status(client: aiohttp.ClientSession, url: str) -> int | None:
    """Return the status of an answer to a GET; None if there is no answer."""
    try:
        async with client.get(url, timeout=aiohttp.ClientTimeout(total=5)) as response:
            return response.status
    except (aiohttp.ClientError, TimeoutError):
        return None


async def metrics(client: aiohttp.ClientSession, server: Server) -> Counter[str]:
    """Return the samples of ``/metrics``, summed by name; a ``state`` label is part of the name."""
    found: Counter[str] = Counter()
    async with client.get(f"{server.url}/metrics") as response:
        for family in text_string_to_metric_families(await response.text()):
            for sample in family.samples:
                state = sample.labels.get("state")
                found[sample.name if state is None else f"{sample.name}/{state}"] += sample.value  # type: ignore[assignment]
    return found


async def counters(client: aiohttp.ClientSession, server: Server) -> Counter[str]:
    """Return the counters of a server that will be started again."""
    found = await metrics(client, server)
    return Counter({name: value for name, value in found.items() if name.endswith("_total")})
