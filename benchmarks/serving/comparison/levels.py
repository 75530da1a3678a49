"""The levels of CPU to which a comparison can limit every server, so that one machine represents several kinds.

The levels and the variables that limit oneDNN, torch and MKL are those of the engine's own ``--cpu-level``.
Everything except reading the features of this machine's CPU is pure.
"""

from typing import get_args

from quire_engine.cpu.limits import KERNELS_VARIABLE, LEVELS, CpuLevel, limit_cpu
from quire_engine.kept import this_machine

NAMES: tuple[CpuLevel, ...] = get_args(CpuLevel)


def highest_level() -> CpuLevel:
    """Return the highest level of this machine's CPU. Raises ValueError below AVX2."""
    level = limit_cpu(this_machine().flags, environment={}).level
    if level is None:
        raise ValueError("this CPU has no AVX2, and no server here runs without it")
    return level


def check_level(level: CpuLevel) -> None:
    """Raise ValueError if this machine's CPU does not reach the level."""
    if LEVELS.index(level) > LEVELS.index(highest := highest_level()):
        raise ValueError(f"--cpu-level {level}: this CPU reaches {highest}")


def library_variables(level: CpuLevel) -> dict[str, str]:
    """Return the variables that limit the libraries of a server that uses torch."""
    limits = limit_cpu(this_machine().flags, option=level, environment={})
    return {name: value for name, value in limits.environment.items() if name != KERNELS_VARIABLE}
