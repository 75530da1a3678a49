"""An engine process with the fake runner, and its reports."""

import asyncio
import os
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import fake_runner
import pytest

from quire_engine.config import CacheOptions, EngineConfig, EngineProcessOptions, ModelOptions, ServerOptions
from quire_engine.core.options import SchedulerOptions
from quire_engine.cpu.choice import CpuChoice
from quire_engine.ipc.client import EngineClient
from quire_engine.ipc.messages import Ready, RunnerFactory, Stats

FAKE = "fake_runner:load_fake_model"


def make_config(**scheduler: Any) -> EngineConfig:
    return EngineConfig(
        model=ModelOptions(path=Path("/nowhere/model")),
        cache=CacheOptions(),
        # Without the stall bound, the contents of steps do not depend on measured times.
        scheduler=SchedulerOptions(**{"check_integrity": True, "max_generation_stall_seconds": 0.0} | scheduler),
        server=ServerOptions(),
        threads=1,
    )


class Reports:
    """The reports of an engine; ``until`` waits for a matching one."""

    def __init__(self) -> None:
        self.ready: list[Ready] = []
        self.stats: list[Stats] = []
        self.sent: list[int] = []
        self.lost = 0
        self._changed = asyncio.Event()

    def engine_ready(self, ready: Ready) -> None:
        self.ready.append(ready)
        self._changed.set()

    def engine_sent(self, prompt_tokens: int) -> None:
        self.sent.append(prompt_tokens)

    def engine_stats(self, stats: Stats) -> None:
        self.stats.append(stats)
        self._changed.set()

    def engine_lost(self) -> None:
        self.lost += 1
        self._changed.set()

    async def until(self, condition: Callable[["Reports"], object]) -> None:
        async with asyncio.timeout(120):
            while not condition(self):
                self._changed.clear()
                await self._changed.wait()

    async def until_idle(self) -> None:
        """Wait until the engine reports that it is idle and all blocks are free."""

        def idle(reports: "Reports") -> bool:
            last = reports.stats[-1] if reports.stats else None
            return last is not None and not any(
                (last.gauges.num_running, last.gauges.num_waiting, last.gauges.blocks_used)
            )

        await self.until(idle)


MakeClient = Callable[..., EngineClient]


@pytest.fixture
async def make_client(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[MakeClient]:
    """Yield a factory of clients with the fake runner, which are closed at the end. The test starts them."""
    folders = Path(__file__).parent, Path(fake_runner.__file__).parent
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(map(str, folders)))
    clients: list[EngineClient] = []

    def make(
        *,
        function: str = FAKE,
        observer: Reports | None = None,
        supervision: EngineProcessOptions | None = None,
        scheduler: dict[str, Any] | None = None,
        cpu: CpuChoice | None = None,
        **options: Any,
    ) -> EngineClient:
        if function == FAKE:
            options.setdefault("num_blocks", 300)  # few blocks, because they are counted after every step
        config = make_config(**(scheduler or {}))
        if supervision is not None:
            config = replace(config, engine_process=supervision)
        clients.append(
            EngineClient(
                config,
                factory=RunnerFactory(function=function, options=options),
                observer=observer,
                cpu=cpu,
            )
        )
        return clients[-1]

    yield make
    for client in clients:
        await client.close()


@pytest.fixture
def reports() -> Reports:
    return Reports()


@pytest.fixture
async def started(make_client: MakeClient, reports: Reports) -> Callable[..., Awaitable[EngineClient]]:
    async def start(**options: Any) -> EngineClient:
        client = make_client(observer=reports, **options)
        await client.start()
        return client

    return start


@pytest.fixture(scope="session", name="make_config")
def make_config_fixture() -> Callable[..., EngineConfig]:
    return make_config
