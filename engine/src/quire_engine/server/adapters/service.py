"""The life of a server's adapters: they are fetched, loaded by the engine process, served and removed.

The list lives in this process, so it survives a restart of the engine process. Nothing here blocks the event loop:
files are downloaded and the adapters file is read in threads.
"""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Coroutine
from contextlib import suppress
from pathlib import Path
from typing import Any, Protocol

from quire_common.contract.adapters_file import (
    AdapterEntry,
    AdapterFailure,
    AdaptersReport,
    AdapterState,
    Slots,
    name_problem,
    parse_adapters,
)
from quire_common.watched_files import WatchedFiles
from quire_engine.config import AdapterOptions
from quire_engine.core.stats import Gauges
from quire_engine.errors import AdapterError, InvalidRequest, NotFound, Unavailable
from quire_engine.server.adapters.registry import AdapterOrigin, AdapterRegistry, AdapterVersion
from quire_engine.server.adapters.sources import Files, allowed_folder

_log = logging.getLogger(__name__)
_POLL_SECONDS = 1.0
_LOADING_SECONDS = 120.0
"""The time for which a request waits for an adapter that is being downloaded or read."""
_RETRY_SECONDS = 5


class AdapterEngine(Protocol):
    """The part of the engine client that adapters use."""

    def load_adapter(self, adapter: int, folder: str) -> None: ...

    def unload_adapter(self, adapter: int) -> None: ...


class AdapterService:
    """The adapters of one server."""

    def __init__(
        self,
        options: AdapterOptions,
        engine: AdapterEngine,
        fetch: Callable[[AdapterEntry], Awaitable[Files]],
        *,
        base_names: tuple[str, ...],
        gauges: Callable[[], Gauges | None],
        loads_total: Callable[[], int],
    ) -> None:
        """``fetch`` returns the files of an adapter; ``gauges`` and ``loads_total`` are the engine's last report."""
        self._options = options
        self._engine = engine
        self._fetch = fetch
        self._gauges = gauges
        self._loads_total = loads_total
        self._registry = AdapterRegistry(base_names)
        self._of_flags: list[AdapterVersion] = []
        self._tasks: set[asyncio.Task[None]] = set()
        self._changed = asyncio.Event()

    @property
    def names(self) -> list[str]:
        """The names of adapters for which requests may be answered."""
        return self._registry.names

    # --- the life of the server ---

    async def start(self) -> None:
        """Begin to load the adapters of the flags and of the file. From now on, requests for their names wait."""
        for name, source in self._options.modules:
            self._of_flags.append(self._registry.put(AdapterEntry(name=name, source=source), AdapterOrigin.FLAG))
        self._act()
        if self._options.file is not None:
            watched = WatchedFiles((self._options.file,), time.monotonic)
            await self._read_file(self._options.file)
            self._run(self._watch(self._options.file, watched))

    async def flags_served(self) -> None:
        """Wait until the adapters of the flags are served. Raise AdapterError if one of them cannot be served."""
        for version in self._of_flags:
            await self._settled(version)
            if version.state is AdapterState.FAILED:
                assert version.reason is not None
                raise AdapterError(
                    version.reason, f"--lora-modules {version.entry.name}: {version.reason}: {version.message}"
                )

    async def close(self) -> None:
        """End all downloads and stop to watch the file."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _run(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _watch(self, file: Path, watched: WatchedFiles) -> None:
        while True:
            await asyncio.sleep(_POLL_SECONDS)
            if await asyncio.to_thread(watched.changed):
                await self._read_file(file)

    async def _read_file(self, file: Path) -> None:
        """Follow the adapters file; a file that cannot be read, or is no such file, changes nothing."""
        try:
            text = await asyncio.to_thread(file.read_text, encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            _log.error("the adapters file %s cannot be read, so nothing changes: %s", file, error)
            return
        entries, problems = parse_adapters(text)
        for problem in problems:
            _log.error("the adapters file %s: %s", file, problem)
        if problems and not entries:
            return
        self._registry.follow_file(entries)
        _log.info("the adapters file %s lists %d adapters", file, len(entries))
        self._act()

    # --- what the registry asks for ---

    def _act(self) -> None:
        actions = self._registry.take_actions()
        for number in actions.unload:
            self._engine.unload_adapter(number)
        for version in actions.fetch:
            self._run(self._load(version))
        self._changed.set()
        self._changed = asyncio.Event()

    async def _load(self, version: AdapterVersion) -> None:
        try:
            files = await self._fetch(version.entry)
        except AdapterError as error:
            self.adapter_failed(version.number, error.reason, str(error))
            return
        except Exception as error:
            _log.exception("fetching the adapter %s failed", version.entry.name)
            self.adapter_failed(version.number, AdapterFailure.DOWNLOAD_FAILED, f"{type(error).__name__}: {error}")
            return
        version.revision = files.revision
        if self._registry.name_of(version.number) is not None:
            self._engine.load_adapter(version.number, str(files.folder))

    def adapter_loaded(self, adapter: int, rank: int, num_bytes: int) -> None:
        """Record the engine's report that an adapter can be served."""
        if (name := self._registry.name_of(adapter)) is not None:
            _log.info("adapter %s is ready: rank %d, %.1f MB", name, rank, num_bytes / 1e6)
        self._registry.loaded(adapter, rank, num_bytes)
        self._act()

    def adapter_failed(self, adapter: int, reason: AdapterFailure, message: str) -> None:
        """Record that an adapter cannot be served."""
        if (name := self._registry.name_of(adapter)) is not None:
            _log.error("adapter %s cannot be served: %s: %s", name, reason, message)
        self._registry.fail(adapter, reason, message)
        self._act()

    async def _settled(self, version: AdapterVersion) -> None:
        """Wait until a version is ready, has failed, or is no longer wanted."""
        while version.state in (AdapterState.KNOWN, AdapterState.DOWNLOADING):
            if self._registry.name_of(version.number) is None:
                return
            await self._changed.wait()

    # --- requests ---

    def served(self, name: str) -> int | None:
        """Return the number of the adapter that answers requests for a name; None while there is no such adapter."""
        version = self._registry.served(name)
        return None if version is None else version.number

    def knows(self, name: str) -> bool:
        """Return whether there is an adapter of this name, whatever its state."""
        return self._registry.wanted(name) is not None

    async def require(self, name: str) -> None:
        """Wait until an adapter can answer requests. Raise NotFound if it cannot, Unavailable if it takes too long."""
        deadline = time.monotonic() + _LOADING_SECONDS
        while self._registry.served(name) is None:
            version = self._registry.wanted(name)
            if version is None or version.state is AdapterState.FAILED:
                raise self._unserved(name, version)
            if self._registry.demand(version):
                self._act()
            with suppress(TimeoutError):
                await asyncio.wait_for(self._changed.wait(), max(0.0, deadline - time.monotonic()))
            if time.monotonic() >= deadline:
                raise Unavailable(
                    f"model: the adapter {name!r} is still being loaded; try again shortly",
                    code="adapter_loading",
                    param="model",
                    retry_after_seconds=_RETRY_SECONDS,
                )

    def _unserved(self, name: str, version: AdapterVersion | None) -> NotFound:
        why = "" if version is None else f": {version.reason}: {version.message}"
        return NotFound(f"model: the adapter {name!r} cannot be served{why}", param="model", code="model_not_found")

    async def load(self, name: str, path: str, *, replace: bool) -> None:
        """Load an adapter for a request, and return when it is served. Raise RequestError."""
        if problem := name_problem(name):
            raise InvalidRequest(f"lora_name: {problem}", param="lora_name")
        folder = await asyncio.to_thread(allowed_folder, path, self._options.roots)
        if self._registry.is_served(name) and not replace:
            raise InvalidRequest(
                f"lora_name: the adapter {name!r} is loaded already; unload it, or set load_inplace",
                param="lora_name",
                code="adapter_exists",
            )
        version = self._registry.put(AdapterEntry(name=name, source=str(folder)), AdapterOrigin.REQUEST)
        self._act()
        await self._settled(version)
        if version.state is AdapterState.FAILED:
            if self._registry.wanted(name) is version and self._registry.served(name) is None:
                self._registry.remove(name)
                self._act()
            raise InvalidRequest(
                f"lora_path: the adapter cannot be served: {version.reason}: {version.message}",
                param="lora_path",
                code="adapter_invalid",
            )
        if self._registry.name_of(version.number) is None:
            raise InvalidRequest(
                f"lora_name: the adapter {name!r} was unloaded or replaced while it was loaded; load it again",
                param="lora_name",
                code="adapter_unloaded",
            )

    def unload(self, name: str) -> None:
        """Stop to serve an adapter; requests that already use it continue. Raise NotFound."""
        if not self._registry.remove(name):
            raise NotFound(f"lora_name: there is no adapter {name[:100]!r}", param="lora_name", code="model_not_found")
        self._act()

    # --- reports ---

    def report(self) -> AdaptersReport:
        """Return the state of every adapter."""
        gauges = self._gauges()
        in_slots = [] if gauges is None else gauges.loaded_adapters
        return AdaptersReport(
            adapters=self._registry.reports(frozenset(in_slots)),
            slots=Slots(total=self._options.max_loras, used=len(in_slots)),
            loads_total=self._loads_total(),
        )

    def sources(self) -> list[tuple[str, str]]:
        """Return the names for which requests may be answered, and the sources of their adapters."""
        found = []
        for name in self._registry.names:
            version = self._registry.served(name) or self._registry.wanted(name)
            assert version is not None
            found.append((name, version.entry.source))
        return found

    def name_of(self, number: int) -> str | None:
        """Return the name of an adapter that is in use; None if it was removed."""
        return self._registry.name_of(number)
