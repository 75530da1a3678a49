"""Text parts of models that also see images: native families give transformers' own tokens."""

from typing import Any

import pytest
from quire_parity.native import WHOLE
from quire_parity.schedules import SCHEDULES

from quire_engine.model.loader import find_candidate


@pytest.mark.parametrize("name", WHOLE)
def test_text_part_gives_the_tokens_of_the_whole_model(name: str, parity: Any) -> None:
    case = WHOLE[name]
    assert find_candidate(parity.prepare(case).folder, impl="auto", trust_remote_code=False).is_native
    parity.check(case, SCHEDULES["prefix hits"])
