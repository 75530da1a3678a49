"""The CPU levels of the engine and of the kernels describe the same CPUs."""

import pytest

from quire_engine.cpu import limits
from quire_engine.cpu.limits import limit_cpu
from quire_kernels.precompiled import LEVEL_VARIABLE
from quire_kernels.precompiled.levels import LEVELS, CpuLevel


def test_engine_and_kernels_use_the_same_variable() -> None:
    assert limits.KERNELS_VARIABLE == LEVEL_VARIABLE


@pytest.mark.parametrize("level", LEVELS, ids=lambda level: level.name)
def test_a_cpu_of_a_level_has_its_kernels(level: CpuLevel) -> None:
    found = limit_cpu(level.flags, environment={})
    assert found.kernels == level.name


@pytest.mark.parametrize("option", limits.LEVELS)
def test_kernels_of_a_limited_cpu_use_nothing_above_the_limit(option: limits.CpuLevel) -> None:
    found = limit_cpu(LEVELS[0].flags, option=option, environment={})
    used = next(level.flags for level in LEVELS if level.name == found.kernels)
    assert limit_cpu(used, environment={}).level == found.level
