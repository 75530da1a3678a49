"""The sampled tokens that end a sequence, and the reported reasons."""

import pytest

from quire_engine.core.batch import FinishReason
from quire_engine.core.sampling_params import SamplingParams
from quire_engine.core.sequence import Request, Sequence


@pytest.mark.parametrize(
    ("token_id", "num_output", "min_tokens", "expected"),
    [
        pytest.param(1, 3, 0, None, id="an ordinary token goes on"),
        pytest.param(9, 3, 0, "stop", id="a stop token stops"),
        pytest.param(9, 1, 0, "stop", id="even as the first"),
        pytest.param(9, 3, 3, None, id="but not within min_tokens"),
        pytest.param(9, 4, 3, "stop", id="and right after them"),
        pytest.param(1, 10, 0, "length", id="the last token allowed"),
        pytest.param(9, 10, 0, "stop", id="a stop token as the last one is a stop"),
        pytest.param(9, 10, 10, "length", id="unless min_tokens hides it"),
    ],
)
def test_stop(token_id: int, num_output: int, min_tokens: int, expected: FinishReason | None) -> None:
    params = SamplingParams(max_tokens=10, min_tokens=min_tokens, stop_token_ids=(9,))
    answer = [*[2] * (num_output - 1), token_id]
    request = Request(key=1, prompt_token_ids=[1] * 10, params=params, seed=0, output_token_ids=answer)
    sequence = Sequence(request, order=(0, 1), limit=20, eos_token_ids=(), num_groups=1)
    assert sequence.finish_reason() == expected
