"""Models that transformers runs with our cache give in float32 its own tokens, under every schedule."""

from typing import Any

import pytest
from quire_parity.backend import CASES
from quire_parity.schedules import Schedule


@pytest.mark.parametrize("name", CASES)
def test_tokens_equal_transformers(name: str, schedule: Schedule, parity: Any) -> None:
    parity.check(CASES[name], schedule)


@pytest.mark.parametrize("name", CASES)
def test_bfloat16_is_close_to_float32(name: str, parity: Any) -> None:
    parity.check_bfloat16(CASES[name])


def test_near_ties_are_rare(parity: Any) -> None:
    assert parity.tally.compared > 100
    assert parity.tally.near_ties <= 0.005 * parity.tally.compared, parity.tally
