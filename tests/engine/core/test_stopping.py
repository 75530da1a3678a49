"""The sampled tokens that end a sequence, and the reported reasons."""

import pytest

from quire_engine.core.stopping import Stop, find_stop

STOP = Stop(reason="stop", token_id=9)
LENGTH = Stop(reason="length")


@pytest.mark.parametrize(
    ("token_id", "num_output", "min_tokens", "num_tokens", "expected"),
    [
        pytest.param(1, 3, 0, 13, None, id="an ordinary token goes on"),
        pytest.param(9, 3, 0, 13, STOP, id="a stop token stops"),
        pytest.param(9, 1, 0, 11, STOP, id="even as the first"),
        pytest.param(9, 3, 3, 13, None, id="but not within min_tokens"),
        pytest.param(9, 4, 3, 14, STOP, id="and right after them"),
        pytest.param(1, 10, 0, 20, LENGTH, id="the last token allowed"),
        pytest.param(9, 10, 0, 20, STOP, id="a stop token as the last one is a stop"),
        pytest.param(9, 10, 10, 20, LENGTH, id="unless min_tokens hides it"),
    ],
)
def test_stop(token_id: int, num_output: int, min_tokens: int, num_tokens: int, expected: Stop | None) -> None:
    found = find_stop(
        token_id,
        stop_ids=frozenset({9}),
        num_output=num_output,
        min_tokens=min_tokens,
        num_tokens=num_tokens,
        limit=20,
    )
    assert found == expected
