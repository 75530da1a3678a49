"""Adapters over an engine that reads every folder except those that the test calls broken."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from quire_common.contract.adapters_file import AdapterEntry, AdapterFailure
from quire_engine.api.adapters import AdapterService, Files
from quire_engine.config import AdapterOptions
from quire_engine.errors import AdapterError


@dataclass
class Reader:
    """The part of an engine that adapters use."""

    adapters: AdapterService | None = None
    loaded: dict[int, str] = field(default_factory=dict)
    unloaded: list[int] = field(default_factory=list)
    fetched: list[AdapterEntry] = field(default_factory=list)
    may_fetch: asyncio.Event = field(default_factory=asyncio.Event)

    def load_adapter(self, adapter: int, folder: str) -> None:
        assert self.adapters is not None
        self.loaded[adapter] = folder
        report: Callable[..., None] = self.adapters.adapter_loaded
        arguments: tuple[Any, ...] = (adapter, 8, 1000)
        if "broken" in folder:
            report = self.adapters.adapter_failed
            arguments = (adapter, AdapterFailure.RANK_TOO_HIGH, "q_proj has rank 64")
        asyncio.get_running_loop().call_soon(report, *arguments)

    def unload_adapter(self, adapter: int) -> None:
        if self.loaded.pop(adapter, None) is not None:
            self.unloaded.append(adapter)

    async def fetch(self, entry: AdapterEntry) -> Files:
        self.fetched.append(entry)
        await self.may_fetch.wait()
        if "missing" in entry.source:
            raise AdapterError(AdapterFailure.DOWNLOAD_FAILED, f"{entry.source} is not a folder")
        return Files(folder=Path(entry.source), revision="v1")


@pytest.fixture
def make_adapters() -> Callable[..., tuple[AdapterService, Reader]]:
    """Return a factory of adapters and their engine; ``fetches=False`` lets fetches wait for ``may_fetch``."""

    def make(*, fetches: bool = True, **options: Any) -> tuple[AdapterService, Reader]:
        reader = Reader()
        if fetches:
            reader.may_fetch.set()
        adapters = AdapterService(
            AdapterOptions(**{"enabled": True, "max_loras": 2} | options),
            reader,
            reader.fetch,
            base_names=("demo", "alias"),
            gauges=lambda: None,
            loads_total=lambda: 5,
        )
        reader.adapters = adapters
        return adapters, reader

    return make
