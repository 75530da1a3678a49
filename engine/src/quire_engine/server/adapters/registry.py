"""The adapters of a server by name. Each load of an adapter is a *version* with a number that is never used again.

A name keeps the version that is served until another one is ready, so a change never interrupts requests. Pure: the
service acts on what ``take_actions`` returns.
"""

from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from enum import Enum, auto

from quire_common.contract.adapters_file import AdapterEntry, AdapterFailure, AdapterReport, AdapterState, Placement


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
