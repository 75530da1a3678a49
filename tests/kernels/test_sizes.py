"""The sizes that launches compute on the host."""

import pytest

from quire_kernels.triton_runtime.sizes import cdiv, next_power_of_2


@pytest.mark.parametrize(("value", "divisor", "expected"), [(0, 4, 0), (1, 4, 1), (4, 4, 1), (5, 4, 2)])
def test_division_rounds_up(value: int, divisor: int, expected: int) -> None:
    assert cdiv(value, divisor) == expected


@pytest.mark.parametrize(("value", "expected"), [(0, 1), (1, 1), (2, 2), (3, 4), (64, 64), (65, 128)])
def test_a_power_of_two_holds_the_value(value: int, expected: int) -> None:
    assert next_power_of_2(value) == expected
