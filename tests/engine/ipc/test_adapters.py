"""Adapters over two processes: they are loaded and used, and a new engine process has them again."""

import asyncio
import os
import signal
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from adapter_support.folders import linear_shapes, make_adapter, of_kinds
from quire_parity import cases
from quire_parity.cases import Case
from quire_parity.engines import config_of

from quire_common.contract.adapters_file import AdapterFailure
from quire_engine.config import AdapterOptions, CacheOptions
from quire_engine.core.options import SchedulerOptions
from quire_engine.core.sampling_params import SamplingParams
from quire_engine.errors import InvalidRequest
from quire_engine.ipc.client import EngineClient


@dataclass
class Heard:
    """The reports about adapters."""

    loaded: list[int] = field(default_factory=list)
    failed: dict[int, AdapterFailure] = field(default_factory=dict)
    changed: asyncio.Event = field(default_factory=asyncio.Event)

    def adapter_loaded(self, adapter: int, rank: int, num_bytes: int) -> None:
        self.loaded.append(adapter)
        self.changed.set()

    def adapter_failed(self, adapter: int, reason: AdapterFailure, message: str) -> None:
        self.failed[adapter] = reason
        self.changed.set()

    async def until(self, condition: Any) -> None:
        async with asyncio.timeout(60):
            while not condition():
                self.changed.clear()
                await self.changed.wait()


async def answer(client: EngineClient, adapter: int | None) -> list[int]:
    stream = client.submit([5, 6, 7] * 8, SamplingParams(max_tokens=12, temperature=0.0), adapter=adapter)
    token_ids: list[int] = []
    while True:
        await stream.wait()
        token_ids += stream.read()[0]
        if stream.finished is not None:
            return token_ids


async def test_a_new_engine_process_has_the_adapters_again(tmp_path: Path) -> None:
    cases.save(Case(family="llama"), tmp_path / "base")
    shapes = of_kinds(linear_shapes(tmp_path / "base"), ("q_proj", "v_proj", "down_proj"))
    config = config_of(
        tmp_path / "base",
        max_model_len=96,
        scheduler=SchedulerOptions(check_integrity=True),
        cache=CacheOptions(kv_cache_memory_bytes=4 << 20),
    )
    client = EngineClient(replace(config, adapters=AdapterOptions(enabled=True, max_loras=1)))
    heard = client.adapter_observer = Heard()
    for number in (1, 2):
        folder = make_adapter(tmp_path / str(number), shapes, seed=number, std=0.3)
        client.load_adapter(number, str(folder))
    client.load_adapter(3, str(tmp_path / "none"))
    ready = await client.start()
    await heard.until(lambda: set(heard.loaded) == {1, 2} and heard.failed == {3: AdapterFailure.INVALID})
    before = await asyncio.gather(*(answer(client, adapter) for adapter in (1, 2, None, 1)))
    assert before[0] == before[3] and len({tuple(one) for one in before}) == 3
    heard.loaded.clear()
    os.kill(ready.pid, signal.SIGKILL)
    await heard.until(lambda: set(heard.loaded) == {1, 2})
    assert await asyncio.gather(*(answer(client, adapter) for adapter in (1, 2, None, 1))) == before
    client.unload_adapter(2)
    try:
        await answer(client, 2)
        raise AssertionError("an unloaded adapter answered")
    except InvalidRequest as error:
        assert "unloaded" in str(error)
    assert await answer(client, 1) == before[0]
    await client.close()
