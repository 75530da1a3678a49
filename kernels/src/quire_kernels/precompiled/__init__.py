"""The use of CPU kernels that ``quire_kernels.precompile`` compiled ahead of time, usually for an image.

``QUIRE_PRECOMPILED_KERNELS`` names the folder, which may be read-only: ``<build>/<level>/<storage>/...``, with the
files that numba writes. ``<build>`` is a hash of everything that determines the machine code except the CPU, so that
old code never runs for changed sources or another numba. If there are kernels for this CPU's level, numba must compile
for that level instead of this exact CPU. numba reads its configuration once, when it is imported, so this module runs
before and imports neither numba nor torch. Without the variable nothing happens.

``QUIRE_KERNELS_LEVEL`` limits this process to the named level, whether or not it has precompiled kernels. The engine
sets it if the CPU reports instructions that do not work or are not wanted.
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
    """Return the kernels that this process uses, decided once; None if the environment names no folder."""
    limit = named_level(os.environ)
    if limit is not None and "numba" not in sys.modules:
        limit_numba(limit, os.environ)
    chosen = os.environ.get(VARIABLE)
    if not chosen:
        return None
    if "numba" in sys.modules:
        return NotUsable(reason="numba was imported before quire_kernels and targets this exact CPU")
    return take(Path(chosen), limit or highest_level(cpu_flags()), os.environ)


def named_level(environment: Mapping[str, str]) -> CpuLevel | None:
    """Return the level that ``QUIRE_KERNELS_LEVEL`` names, or None if it is not set.

    Raise ValueError if it is unknown.
    """
    name = environment.get(LEVEL_VARIABLE)
    if not name:
        return None
    for level in LEVELS:
        if level.name == name:
            return level
    raise ValueError(f"{LEVEL_VARIABLE}={name} is not among {', '.join(level.name for level in LEVELS)}")


def limit_numba(level: CpuLevel, environment: MutableMapping[str, str]) -> None:
    """Make numba compile for the level, or for the environment's CPU without the features beyond the level."""
    name, features = environment.get(_CPU), environment.get(_FEATURES)
    if not name and not features:
        environment.update({_CPU: level.cpu, _FEATURES: level.feature_string})
        return
    lacking = KNOWN - level.features
    kept = [each for each in (features or "").split(",") if each and (each[0] == "-" or each[1:] not in lacking)]
    environment[_FEATURES] = ",".join([*kept, *(f"-{name}" for name in sorted(lacking) if f"-{name}" not in kept)])


def take(store: Path, level: CpuLevel | None, environment: MutableMapping[str, str]) -> Precompiled | NotUsable:
    """Find the level's kernels and set numba's target to the level, unless the environment selects another CPU."""
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
        return NotUsable(reason="no precompiled level matches this CPU")
    if not store.is_dir():
        return NotUsable(reason=f"{VARIABLE} names {store}, which is not a folder")
    if not (store / build()).is_dir():
        return NotUsable(
            reason=f"the kernels in {store} are for other sources, another path, another Python or another numba"
        )
    folder = store / build() / level.name
    if not folder.is_dir():
        return NotUsable(reason=f"{store} has no kernels for {level.name}")
    return Precompiled(level=level, folder=folder)


def build() -> str:
    """Return a hash of Python, numba, all sources from which workers are compiled, and their path.

    numba's own cache depends on the path too.
    """
    told = (sys.implementation.cache_tag, _version("numba"), _version("llvmlite"), str(_PACKAGE))
    digest = hashlib.sha256(repr(told).encode())
    # Workers contain the values of constants, some of which are in the __init__.py of their op.
    patterns = ("*/__init__.py", "*/cpu*.py", "cpu_runtime/*.py")
    for source in sorted({source for pattern in patterns for source in _PACKAGE.glob(pattern)}):
        digest.update(source.read_bytes())
    return digest.hexdigest()[:16]


def _version(distribution: str) -> str | None:
    try:
        return version(distribution)
    except PackageNotFoundError:
        return None


def link_all(source: Path, target: Path) -> None:
    """Link each file below ``source`` to the same place below ``target``, unless it exists there. Raise OSError.

    Links are sufficient, because numba replaces whole files. Other processes may do the same at the same time.
    """
    for file in source.rglob("*.nb[ic]"):
        link = target / file.relative_to(source)
        if link.exists():
            continue
        link.parent.mkdir(parents=True, exist_ok=True)
        made = link.with_name(f"{link.name}.{os.getpid()}.link")
        made.symlink_to(file)
        os.replace(made, link)  # The replaced file may be a link into an image that no longer exists.
