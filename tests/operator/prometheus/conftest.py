"""A real Prometheus on loopback, and engines that are metrics pages."""

import asyncio
import json
import subprocess
from collections.abc import AsyncIterator, Callable, Mapping
from pathlib import Path

import httpx
import pytest
from aiohttp import web

from quire_cluster.ports import free_ports

SCRAPE_INTERVAL = "200ms"


class Engine:
    """A replica as Prometheus sees it: a page with chosen values."""

    def __init__(self) -> None:
        self.running, self.waiting, self.generated = 0, 0, 0
        self.address = ""
        self.silent = False

    async def page(self, request: web.Request) -> web.Response:
        if self.silent:
            return web.Response(status=500)
        lines = [
            f'vllm:num_requests_running{{engine="0"}} {self.running}',
            f'vllm:num_requests_waiting{{engine="0"}} {self.waiting}',
            'vllm:kv_cache_usage_perc{engine="0"} 0.5',
            'vllm:cache_config_info{engine="0",block_size="16",num_gpu_blocks="100"} 1',
            f'vllm:generation_tokens_total{{engine="0"}} {self.generated}',
            'quire_first_token_wait_seconds_bucket{engine="0",le="1.0"} 8',
            'quire_first_token_wait_seconds_bucket{engine="0",le="+Inf"} 10',
        ]
        return web.Response(text="\n".join(lines) + "\n")


@pytest.fixture
async def engine() -> AsyncIterator[Callable[[], "asyncio.Future[Engine]"]]:
    """Yield a function that starts engines."""
    runners: list[web.AppRunner] = []

    async def start() -> Engine:
        engine = Engine()
        app = web.Application()
        app.router.add_get("/metrics", engine.page)
        runner = web.AppRunner(app, shutdown_timeout=0.1)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        engine.address = f"127.0.0.1:{runner.addresses[0][1]}"
        runners.append(runner)
        return engine

    yield start
    for runner in runners:
        await runner.cleanup()


class PrometheusServer:
    """A Prometheus process that can be killed and restarted with the same data."""

    def __init__(self, program: Path, folder: Path) -> None:
        self._program, self._folder = program, folder
        self.targets = folder / "targets.json"
        self.targets.write_text("[]")
        (self._port,) = free_ports(1)
        self.url = f"http://127.0.0.1:{self._port}"
        self._process: subprocess.Popen[bytes] | None = None
        (folder / "prometheus.yml").write_text(
            f"""\
global: {{scrape_interval: {SCRAPE_INTERVAL}, scrape_timeout: {SCRAPE_INTERVAL}}}
scrape_configs:
  - job_name: engines
    file_sd_configs: [{{files: [{self.targets}], refresh_interval: 1s}}]
"""
        )

    def show(self, *addresses: str, **labels: str) -> None:
        """Scrape only these addresses."""
        fresh = self._folder / ".targets.new"
        fresh.write_text(json.dumps([{"targets": addresses, "labels": labels}]))
        fresh.rename(self.targets)

    async def start(self) -> None:
        with (self._folder / "prometheus.log").open("ab") as log:
            self._process = subprocess.Popen(
                [
                    self._program,
                    f"--config.file={self._folder / 'prometheus.yml'}",
                    f"--storage.tsdb.path={self._folder / 'data'}",
                    f"--web.listen-address=127.0.0.1:{self._port}",
                ],
                stdout=log,
                stderr=log,
            )
        async with httpx.AsyncClient(trust_env=False) as client:
            while True:
                try:
                    if (await client.get(f"{self.url}/-/ready")).status_code == 200:
                        return
                except httpx.TransportError:
                    pass
                assert self._process.poll() is None, (self._folder / "prometheus.log").read_text()[-2000:]
                await asyncio.sleep(0.05)

    def kill(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None


@pytest.fixture
async def server(prometheus_programs: Mapping[str, Path], tmp_path: Path) -> AsyncIterator[PrometheusServer]:
    prometheus = PrometheusServer(prometheus_programs["prometheus"], tmp_path)
    await prometheus.start()
    yield prometheus
    prometheus.kill()
