"""The adapters of an engine: the file that lists those to serve, and its report about them.

The operator writes the file into a ConfigMap, and the engine reads it again when it changes (``--adapters-file``):

{"adapters": [{"name": "fr-legal", "source": "s3://adapters/fr-legal", "revision": null, "generation": 3,
               "placement": "All"}]}

A changed source, revision or generation of a name means that the adapter is loaded again. A name that is missing is
unloaded once no request uses it. The report is the body of ``GET /quire/v1/adapters``. Sources are text here: the
engine and the operator parse them with ``quire_common.model_source``.
"""

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import Any, TypeVar

T = TypeVar("T")

ADAPTERS_KEY = "adapters.json"
"""The key of the ConfigMap, and so the name of the file."""
ADAPTERS_PATH = "/quire/v1/adapters"
"""The path of the report."""
_NAME = re.compile(r"[A-Za-z0-9]([A-Za-z0-9._:/@-]{0,252}[A-Za-z0-9])?")


class Placement(StrEnum):
    """Where an adapter is loaded."""

    ALL = "All"
    """Every replica downloads and checks it as soon as it is listed."""
    ON_DEMAND = "OnDemand"
    """A replica downloads it at the first request for it."""


class AdapterState(StrEnum):
    """The progress of an engine with an adapter."""

    KNOWN = "Known"
    """It is placed on demand, and no request has asked for it yet."""
    DOWNLOADING = "Downloading"
    """It is downloaded, or read and checked."""
    READY = "Ready"
    """It can be served; it is on disk or in host memory."""
    LOADED = "Loaded"
    """It is in a slot of the device now."""
    FAILED = "Failed"
    """It cannot be served; ``reason`` and ``message`` say why."""


class AdapterFailure(StrEnum):
    """The reason why an adapter cannot be served."""

    DOWNLOAD_FAILED = "DownloadFailed"
    RANK_TOO_HIGH = "RankTooHigh"
    WRONG_BASE = "WrongBase"
    INVALID = "InvalidAdapter"
    NO_ROOM = "NoRoom"


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterEntry:
    """One adapter that an engine is to serve."""

    name: str
    """The model name in requests."""
    source: str
    """Where its files are, as in ``spec.source``."""
    revision: str | None = None
    """The version of the source that is wanted; None leaves it to the source."""
    generation: int = 0
    """A number that changes whenever the adapter is to be loaded again."""
    placement: Placement = Placement.ALL


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterReport:
    """The state of one adapter in one engine."""

    name: str
    generation: int
    """The ``generation`` of the entry that this state belongs to."""
    state: AdapterState
    reason: AdapterFailure | None = None
    message: str | None = None
    revision: str | None = None
    """The version that was downloaded, if the source has versions."""
    rank: int | None = None
    bytes: int | None = None
    """Its size in memory."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Slots:
    """The places for adapters on the device."""

    total: int
    used: int


@dataclass(frozen=True, slots=True, kw_only=True)
class AdaptersReport:
    """The body of ``GET /quire/v1/adapters``."""

    adapters: Sequence[AdapterReport]
    slots: Slots
    loads_total: int
    """The number of times an adapter was copied into a slot since the engine process started."""


def render_adapters(adapters: Iterable[AdapterEntry]) -> str:
    """Return the text of an adapters file, in the order of the names."""
    entries = sorted(adapters, key=lambda adapter: adapter.name)
    return json.dumps({"adapters": [asdict(entry) for entry in entries]}, indent=1)


def parse_adapters(text: str) -> tuple[list[AdapterEntry], list[str]]:
    """Return the usable entries of an adapters file, and what is wrong with the others.

    A problem starts with the path of its field. A file that is no such object at all has one problem and no entries:
    a caller keeps what it had.
    """
    try:
        content = json.loads(text)
    except ValueError as error:
        return [], [f"the file is not JSON: {error}"]
    listed = content.get("adapters") if isinstance(content, dict) else None
    if not isinstance(listed, list):
        return [], ['adapters: expected {"adapters": [...]}, a list of objects with name and source']
    entries: dict[str, AdapterEntry] = {}
    problems: list[str] = []
    for place, raw in enumerate(listed):
        entry, found = _entry(raw, f"adapters[{place}]")
        problems += found
        if entry is not None and entry.name in entries:
            problems.append(f"adapters[{place}].name: {entry.name!r} is listed twice; the first entry counts")
        elif entry is not None:
            entries[entry.name] = entry
    return list(entries.values()), problems


def name_problem(name: object) -> str | None:
    """Return why no adapter can have this name, or None if one can."""
    if isinstance(name, str) and _NAME.fullmatch(name):
        return None
    return (
        f"{name!r} is not a model name: "
        "use 1 to 254 letters, digits and . _ : / @ -, with a letter or digit at both ends"
    )


def _entry(raw: object, path: str) -> tuple[AdapterEntry | None, list[str]]:
    if not isinstance(raw, dict):
        return None, [f"{path}: expected an object with name and source"]
    problems = [f"{path}.{key}: unknown field" for key in raw if key not in _FIELDS]
    if (problem := name_problem(raw.get("name"))) is not None:
        problems.append(f"{path}.name: {problem}")
    source, revision = raw.get("source"), raw.get("revision")
    generation, placement = raw.get("generation", 0), raw.get("placement", "All")
    if not isinstance(source, str) or not source:
        problems.append(f"{path}.source: expected a text such as s3://bucket/path")
    if revision is not None and not isinstance(revision, str):
        problems.append(f"{path}.revision: expected a text or null")
    if not isinstance(generation, int) or isinstance(generation, bool) or generation < 0:
        problems.append(f"{path}.generation: expected a whole number of at least 0")
    if placement not in list(Placement):
        problems.append(f"{path}.placement: expected one of {', '.join(Placement)}")
    if problems:
        return None, problems
    return AdapterEntry(**{**raw, "placement": Placement(placement)}), []


_FIELDS = frozenset(AdapterEntry.__dataclass_fields__)


def render_report(report: AdaptersReport) -> dict[str, Any]:
    return asdict(report)


def parse_report(content: object) -> AdaptersReport | None:
    """Return the report that an engine sent, or None if it is invalid. Fields of newer engines are left out."""
    if not isinstance(content, Mapping):
        return None
    try:
        slots = content["slots"]
        return AdaptersReport(
            adapters=[_report(raw) for raw in content["adapters"]],
            slots=Slots(total=int(slots["total"]), used=int(slots["used"])),
            loads_total=int(content["loads_total"]),
        )
    except (AttributeError, KeyError, TypeError, ValueError, OverflowError):
        return None


def _report(raw: Mapping[str, Any]) -> AdapterReport:
    reason = raw.get("reason")
    return AdapterReport(
        name=str(raw["name"]),
        generation=int(raw["generation"]),
        state=AdapterState(raw["state"]),
        reason=None if reason is None else AdapterFailure(reason),
        message=_optional(raw, "message", str),
        revision=_optional(raw, "revision", str),
        rank=_optional(raw, "rank", int),
        bytes=_optional(raw, "bytes", int),
    )


def _optional(raw: Mapping[str, Any], name: str, kind: type[T]) -> T | None:
    value = raw.get(name)
    if value is not None and not isinstance(value, kind):
        raise TypeError(f"{name} is not of type {kind.__name__}")
    return value
