"""The adapters of a server: they are fetched, loaded by the engine process, served by name and removed.

Each load of an adapter is a *version* with a number that is never used again.
"""

import asyncio
import logging
import os
import time
from collections.abc import Awaitable, Callable, Collection, Coroutine, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from enum import Enum, auto
from pathlib import Path
from typing import Any, Protocol

from quire_common.contract.adapters_file import (
    AdapterEntry,
    AdapterFailure,
    AdapterReport,
    AdaptersReport,
    AdapterState,
    Placement,
    Slots,
    name_problem,
    parse_adapters,
)
from quire_common.model_source import (
    ClaimSource,
    FileSource,
    HubSource,
    ImageSource,
    RemoteSource,
    cache_home,
    expected,
    parse_source,
)
from quire_common.watched_files import WatchedFiles
from quire_engine.config import AdapterOptions
from quire_engine.core.stats import Gauges
from quire_engine.download import fetch_model, remote_source
from quire_engine.errors import (
    AdapterError,
    FetchError,
    Forbidden,
    InvalidRequest,
    ModelFolderError,
    NotFound,
    Unavailable,
)
from quire_engine.fetch.version_lock import hold

_log = logging.getLogger(__name__)


class AdapterOrigin(Enum):
    """The origin of an adapter in the registry."""

    FLAG = auto()
    FILE = auto()
    REQUEST = auto()


@dataclass(slots=True, eq=False)
class AdapterVersion:
    """One load of an adapter."""

    number: int
    entry: AdapterEntry
    state: AdapterState = AdapterState.KNOWN
    reason: AdapterFailure | None = None
    message: str | None = None
    revision: str | None = None
    rank: int | None = None
    num_bytes: int | None = None


@dataclass(slots=True)
class _Name:
    origin: AdapterOrigin
    wanted: AdapterVersion
    served: AdapterVersion | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Actions:
    """The work to do after a change."""

    fetch: list[AdapterVersion] = field(default_factory=list)
    """The versions whose files are needed."""
    unload: list[int] = field(default_factory=list)
    """The numbers of versions that no name serves any more."""


class AdapterRegistry:
    """The names of adapters, without those of the base model, which are ``reserved``."""

    def __init__(self, reserved: Collection[str]) -> None:
        self._reserved = frozenset(reserved)
        self._names: dict[str, _Name] = {}
        self._versions: dict[int, AdapterVersion] = {}
        self._last_number = 0
        self._fetch: list[AdapterVersion] = []
        self._unload: list[int] = []

    def take_actions(self) -> Actions:
        """Return what is to be done since the last call."""
        actions = Actions(fetch=self._fetch, unload=self._unload)
        self._fetch, self._unload = [], []
        return actions

    def put(self, entry: AdapterEntry, origin: AdapterOrigin) -> AdapterVersion:
        """Serve an adapter under its name, in place of the one that has the name now; fetch it unless on demand."""
        version = self._new_version(entry)
        before = self._names.get(entry.name)
        if before is None:
            self._names[entry.name] = _Name(origin=origin, wanted=version)
        else:
            if before.wanted is not before.served:
                self._drop(before.wanted)
            before.origin, before.wanted = origin, version
        if entry.name in self._reserved:
            self.fail(version.number, AdapterFailure.INVALID, f"the base model is served as {entry.name}")
        elif entry.placement is Placement.ALL or (before is not None and before.served is not None):
            self.demand(version)
        return version

    def _new_version(self, entry: AdapterEntry) -> AdapterVersion:
        self._last_number += 1
        version = self._versions[self._last_number] = AdapterVersion(self._last_number, entry)
        return version

    def demand(self, version: AdapterVersion) -> bool:
        """Fetch a version, unless that was started; return whether it starts now."""
        if version.state is not AdapterState.KNOWN:
            return False
        version.state = AdapterState.DOWNLOADING
        self._fetch.append(version)
        return True

    def follow_file(self, entries: Iterable[AdapterEntry]) -> None:
        """Serve exactly the adapters of the file, besides those of flags and requests."""
        listed = {entry.name: entry for entry in entries}
        for name, held in list(self._names.items()):
            if held.origin is AdapterOrigin.FILE and name not in listed:
                self.remove(name)
        for name, entry in listed.items():
            known = self._names.get(name)
            if known is None or (known.origin is AdapterOrigin.FILE and _changed(known.wanted.entry, entry)):
                self.put(entry, AdapterOrigin.FILE)

    def remove(self, name: str) -> bool:
        """Stop to serve a name; return False if there is no such adapter."""
        held = self._names.pop(name, None)
        if held is None:
            return False
        for version in {held.wanted, *filter(None, (held.served,))}:
            self._drop(version)
        return True

    def _drop(self, version: AdapterVersion) -> None:
        if self._versions.pop(version.number, None) is not None:
            self._unload.append(version.number)

    def loaded(self, number: int, rank: int, num_bytes: int) -> None:
        """Record that a version can be served; it replaces the one that was served under its name."""
        version = self._versions.get(number)
        if version is None:
            return
        version.state, version.rank, version.num_bytes = AdapterState.READY, rank, num_bytes
        held = self._names[version.entry.name]
        if held.wanted is version and held.served is not version:
            if held.served is not None:
                self._drop(held.served)
            held.served = version

    def fail(self, number: int, reason: AdapterFailure, message: str) -> None:
        """Record that a version cannot be served."""
        version = self._versions.get(number)
        if version is None:
            return
        version.state, version.reason, version.message = AdapterState.FAILED, reason, message
        held = self._names[version.entry.name]
        if held.served is version:
            held.served = None
        elif held.served is not None:
            version.message = f"{message}; the version before it is still served"
        self._unload.append(number)

    def wanted(self, name: str) -> AdapterVersion | None:
        """Return the newest version of a name, whatever its state."""
        held = self._names.get(name)
        return None if held is None else held.wanted

    def served(self, name: str) -> AdapterVersion | None:
        """Return the version that answers requests for a name; None while there is no such version."""
        held = self._names.get(name)
        return None if held is None else held.served

    def name_of(self, number: int) -> str | None:
        version = self._versions.get(number)
        return None if version is None else version.entry.name

    def is_served(self, name: str) -> bool:
        """Return whether a request for a name may be answered: now, or once it is loaded."""
        held = self._names.get(name)
        return held is not None and (held.served is not None or held.wanted.state is not AdapterState.FAILED)

    @property
    def names(self) -> list[str]:
        """Return the names for which requests may be answered."""
        return [name for name in sorted(self._names) if self.is_served(name)]

    def reports(self, in_slots: Collection[int]) -> list[AdapterReport]:
        """Return the state of each name; ``in_slots`` are the numbers of versions in slots of the device."""
        return [_report(held.wanted, in_slots) for _, held in sorted(self._names.items())]


def _changed(before: AdapterEntry, now: AdapterEntry) -> bool:
    """Return whether the adapter must be loaded again, or at once instead of on demand."""
    return (before.source, before.revision, before.generation) != (now.source, now.revision, now.generation) or (
        before.placement is not now.placement
    )


def _report(version: AdapterVersion, in_slots: Collection[int]) -> AdapterReport:
    state = version.state
    if state is AdapterState.READY and version.number in in_slots:
        state = AdapterState.LOADED
    return AdapterReport(
        name=version.entry.name,
        generation=version.entry.generation,
        state=state,
        reason=version.reason,
        message=version.message,
        revision=version.revision,
        rank=version.rank,
        bytes=version.num_bytes,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Files:
    """The files of an adapter on this machine."""

    folder: Path
    revision: str | None = None
    """The version that was downloaded, if the source has versions."""


def source_of(entry: AdapterEntry) -> RemoteSource | Path:
    """Return the folder of an entry, or where it is downloaded from. Raise AdapterError."""
    text = entry.source
    if "://" not in text:
        try:
            return remote_source(Path(text), entry.revision) or Path(text)
        except ModelFolderError as error:
            raise _failed(str(error)) from error
    source = parse_source(text)
    if isinstance(source, HubSource) and entry.revision is not None:
        source = parse_source(f"hf://{source.repository}@{entry.revision}")
    elif entry.revision is not None:
        raise _failed(f"{text} has no revisions, so that revision {entry.revision!r} cannot be chosen")
    match source:
        case None:
            raise _failed(f"source {text!r} is not a source: expected {expected(text)}")
        case FileSource(path=path):
            return Path(path)
        case ClaimSource() | ImageSource():
            raise _failed(f"{text}: an engine cannot mount a claim or an image; use a folder, a hub or a bucket")
        case remote:
            return remote


async def fetch_files(entry: AdapterEntry, cache: Path | None) -> Files:
    """Return the files of an adapter, after a download if they are elsewhere. Raise AdapterError."""
    source = source_of(entry)
    if isinstance(source, Path):
        if not source.is_dir():
            raise _failed(f"{source} is not a folder")
        return Files(folder=source)
    try:
        folder = await asyncio.to_thread(_download, source, cache or cache_home(os.environ))
    except FetchError as error:
        raise _failed(" ".join(filter(None, (str(error), error.hint)))) from error
    return Files(folder=folder, revision=folder.name)


def _download(source: RemoteSource, cache: Path) -> Path:
    folder = fetch_model(source, cache, of_adapter=True)
    hold(folder)  # no other process removes the version to make room
    return folder


def allowed_folder(path: str, roots: Sequence[Path]) -> Path:
    """Return a folder that a request may load.

    Raise Forbidden outside of the roots, InvalidRequest if it does not exist.
    """
    if not roots:
        raise Forbidden(
            "adapters cannot be loaded by requests: start the server with --adapter-roots, the folders that they may"
            " read",
            code="adapter_loading_disabled",
        )
    folder = Path(os.path.realpath(path))
    if not any(folder.is_relative_to(os.path.realpath(root)) for root in roots):
        raise Forbidden(
            "lora_path: the folder is not below one of --adapter-roots",
            param="lora_path",
            code="adapter_path_forbidden",
        )
    if not folder.is_dir():
        raise InvalidRequest(f"lora_path: {path[:200]!r} is not a folder", param="lora_path")
    return folder


def _failed(message: str) -> AdapterError:
    return AdapterError(AdapterFailure.DOWNLOAD_FAILED, message)


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
