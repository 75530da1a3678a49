"""CPU kernels compiled ahead of time, as ``quire_kernels.precompile`` leaves them and images bring them along.

``QUIRE_PRECOMPILED_KERNELS`` names the folder, which may be read-only: ``<build>/<level>/<storage>/...``, below which
lies what numba writes. ``<build>`` is of all that machine code depends on beside the CPU, so that a changed source or
another numba never meets old code. Where there are kernels of this CPU's level, numba is told to compile for that level
instead of this very CPU, as the package is imported: numba asks once, when it is imported itself. So this imports
neither numba nor torch. Without the variable nothing happens.

``QUIRE_KERNELS_LEVEL`` limits this process to a level by name, whether or not there are compiled kernels of it: the
engine sets it where the CPU claims instructions that do not work, or that nobody wants.
"""

import functools
import hashlib
import os
import sys
from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from quire_kernels.precompiled.levels import KNOWN, LEVELS, CpuLevel, cpu_flags, highest_level

VARIABLE = "QUIRE_PRECOMPILED_KERNELS"
LEVEL_VARIABLE = "QUIRE_KERNELS_LEVEL"
_PACKAGE = Path(__file__).parent.parent
_CPU, _FEATURES = "NUMBA_CPU_NAME", "NUMBA_CPU_FEATURES"


@dataclass(frozen=True, slots=True, kw_only=True)
class Precompiled:
    level: CpuLevel
    folder: Path


@dataclass(frozen=True, slots=True, kw_only=True)
class NotUsable:
    reason: str


@functools.cache
def taken() -> Precompiled | NotUsable | None:
    """What this process uses, decided once; None where nothing is offered."""
    limit = named_level(os.environ)
    if limit is not None and "numba" not in sys.modules:
        limit_numba(limit, os.environ)
    chosen = os.environ.get(VARIABLE)
    if not chosen:
        return None
    if "numba" in sys.modules:
        return NotUsable(reason="numba was imported before quire_kernels, for this very CPU")
    return take(Path(chosen), limit or highest_level(cpu_flags()), os.environ)


def named_level(environment: Mapping[str, str]) -> CpuLevel | None:
    """Return the level that ``QUIRE_KERNELS_LEVEL`` names; None where it is not set. Raises ValueError."""
    name = environment.get(LEVEL_VARIABLE)
    if not name:
        return None
    for level in LEVELS:
        if level.name == name:
            return level
    raise ValueError(f"{LEVEL_VARIABLE}={name} is not among {', '.join(level.name for level in LEVELS)}")


def limit_numba(level: CpuLevel, environment: MutableMapping[str, str]) -> None:
    """Have numba compile for the level, or for the CPU that the environment names without what the level lacks."""
    name, features = environment.get(_CPU), environment.get(_FEATURES)
    if not name and not features:
        environment.update({_CPU: level.cpu, _FEATURES: level.feature_string})
        return
    lacking = KNOWN - level.features
    kept = [each for each in (features or "").split(",") if each and (each[0] == "-" or each[1:] not in lacking)]
    environment[_FEATURES] = ",".join([*kept, *(f"-{name}" for name in sorted(lacking) if f"-{name}" not in kept)])


def take(store: Path, level: CpuLevel | None, environment: MutableMapping[str, str]) -> Precompiled | NotUsable:
    """Finds the level's kernels and tells numba of the level; another CPU chosen in the environment counts more."""
    found = find(store, level)
    if isinstance(found, NotUsable):
        return found
    levels = {_CPU: found.level.cpu, _FEATURES: found.level.feature_string}
    if any(environment.get(name, value) != value for name, value in levels.items()):
        return NotUsable(reason=f"{_CPU} and {_FEATURES} choose another CPU than {found.level.name}")
    environment.update(levels)
    return found


def find(store: Path, level: CpuLevel | None) -> Precompiled | NotUsable:
    if level is None:
        return NotUsable(reason="this CPU is of no level that they are compiled for ahead of time")
    if not store.is_dir():
        return NotUsable(reason=f"{VARIABLE} names {store}, which is no folder")
    if not (store / build()).is_dir():
        return NotUsable(
            reason=f"those in {store} are of other sources, another place of them, another Python or another numba"
        )
    folder = store / build() / level.name
    if not folder.is_dir():
        return NotUsable(reason=f"{store} has none for {level.name}")
    return Precompiled(level=level, folder=folder)


def build() -> str:
    """Of Python, numba and all sources that workers are compiled from, and where those lie: numba goes by that too."""
    told = (sys.implementation.cache_tag, _version("numba"), _version("llvmlite"), str(_PACKAGE))
    digest = hashlib.sha256(repr(told).encode())
    sources = [*_PACKAGE.glob("*/cpu.py"), *_PACKAGE.glob("cpu_runtime/*.py"), _PACKAGE / "packed_linear/__init__.py"]
    for source in sorted(sources):
        digest.update(source.read_bytes())
    return digest.hexdigest()[:16]


def _version(distribution: str) -> str | None:
    try:
        return version(distribution)
    except PackageNotFoundError:
        return None


def link_all(source: Path, target: Path) -> None:
    """Makes each file below ``source`` one below ``target``, but for those that are there. Raises OSError.

    Links are enough: numba replaces files as wholes. Others may be doing the same.
    """
    for file in source.rglob("*.nb[ic]"):
        link = target / file.relative_to(source)
        if link.exists():
            continue
        link.parent.mkdir(parents=True, exist_ok=True)
        made = link.with_name(f"{link.name}.{os.getpid()}.link")
        made.symlink_to(file)
        os.replace(made, link)  # also of a link to an image that is gone
