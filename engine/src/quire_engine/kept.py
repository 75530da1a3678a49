"""Measurements of this machine that are kept on disk: ``${XDG_CACHE_HOME:-~/.cache}/quire/<kind>/<key>.json``.

A file that is damaged or of another machine counts as none, and a folder that cannot be written costs the measurement
at each start and nothing else: ``problem`` says so once, when a start begins.
"""

import contextlib
import hashlib
import os
import platform
import sys
import tempfile
from collections.abc import Iterable
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Protocol, TypeVar

from quire_engine import __version__

_IDENTITY = ("vendor_id", "cpu family", "model", "model name", "stepping", "microcode", "CPU part")
_LIBRARIES = ("torch", "numba", "llvmlite")


class Measurement(Protocol):
    @property
    def facts(self) -> tuple[str, ...]:
        """Everything that determines the results."""
        ...


Kept = TypeVar("Kept", bound=Measurement)


def key_of(facts: Iterable[str]) -> str:
    """Return the name of the file that belongs to these facts."""
    return hashlib.sha256("\n".join(facts).encode()).hexdigest()[:16]


def file_of(kind: str, key: str) -> Path:
    """Return the path of a kept measurement. Raises RuntimeError for a user without a home folder."""
    return _folder() / kind / f"{key}.json"


def read(kind: str, facts: tuple[str, ...], type: type[Kept]) -> Kept | None:
    """Return what was kept for these facts; None where there is no whole file of this type."""
    import msgspec  # a machine that only runs the engine in process may lack it

    # msgspec raises UnicodeDecodeError, not an error of its own, for a text that is not UTF-8.
    with contextlib.suppress(OSError, RuntimeError, msgspec.DecodeError, UnicodeDecodeError):
        found = msgspec.json.decode(file_of(kind, key_of(facts)).read_bytes(), type=type, strict=True)
        return found if found.facts == facts else None
    return None


def write(kind: str, value: Measurement) -> None:
    """Write a value atomically under its facts, because several engines may start at once.

    A folder that cannot be written is not an error here.
    """
    import msgspec

    with contextlib.suppress(OSError, RuntimeError):
        file = file_of(kind, key_of(value.facts))
        file.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=file.parent, suffix=".part", delete=False) as part:
            try:
                part.write(msgspec.json.encode(value))
                part.flush()
                os.replace(part.name, file)
            except OSError:
                os.unlink(part.name)


def problem() -> str | None:
    """Return why measurements cannot be kept; None where they can."""
    try:
        folder = _folder()
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            return None
    except (OSError, RuntimeError) as error:
        return (
            f"the CPU is tested and layers are timed at every start, as the results cannot be kept: {error}; set"
            " XDG_CACHE_HOME to a writable folder"
        )


def _folder() -> Path:
    home = os.environ.get("XDG_CACHE_HOME")
    return (Path(home) if home else Path("~/.cache").expanduser()) / "quire"


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """The CPU as the system lists it, and the software that runs on it."""

    flags: frozenset[str]
    facts: tuple[str, ...]
    """Everything that results depend on: model, microcode and flags of the CPU, kernel release, versions."""

    @property
    def is_x86_64(self) -> bool:
        """True if this kind of machine has levels of CPU instructions."""
        return sys.platform == "linux" and platform.machine() == "x86_64"


def this_machine(cpuinfo: Path = Path("/proc/cpuinfo")) -> Machine:
    """Return the machine from ``/proc/cpuinfo``; a system without that file has neither flags nor a model name."""
    fields = _first_cpu(cpuinfo)
    flags = frozenset((fields.get("flags") or fields.get("Features") or "").split())
    facts = (
        *(f"{name}: {fields[name]}" for name in _IDENTITY if name in fields),
        f"flags: {' '.join(sorted(flags))}",
        f"kernel: {platform.machine()} {os.uname().release}",
        f"quire: {__version__}",
        *(f"{name}: {_version(name)}" for name in _LIBRARIES),
    )
    return Machine(flags=flags, facts=facts)


def _first_cpu(cpuinfo: Path) -> dict[str, str]:
    try:
        lines = cpuinfo.read_text(errors="replace").splitlines()
    except OSError:
        return {}
    first = lines[: lines.index("")] if "" in lines else lines
    pairs = (line.partition(":") for line in first)
    return {name.strip(): value.strip() for name, _, value in pairs}


def _version(distribution: str) -> str | None:
    try:
        return version(distribution)
    except PackageNotFoundError:
        return None
