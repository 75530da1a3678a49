"""The identity of a machine on which instructions are tried and layers are timed."""

import os
import platform
import sys
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from quire_engine import __version__

_IDENTITY = ("vendor_id", "cpu family", "model", "model name", "stepping", "microcode", "CPU part")
_LIBRARIES = ("torch", "numba", "llvmlite")


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """The CPU as the system lists it, and the software that runs on it."""

    flags: frozenset[str]
    facts: tuple[str, ...]
    """Everything that results depend on: model, microcode and flags of the CPU, kernel release, versions."""

    @property
    def is_x86_64(self) -> bool:
        """True if the trials support this kind of machine."""
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
