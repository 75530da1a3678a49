"""Token masks: only the masked rows change, whether few or nearly all tokens are allowed."""

import numpy as np
import pytest
import torch

from quire_engine.core.batch import TokenMasks, mask_bytes
from quire_engine.runner.sampler import apply_masks


@pytest.mark.parametrize("vocab_size", [31, 32, 40, 1000])
@pytest.mark.parametrize("share", [0.0, 0.01, 0.5, 0.99, 1.0])
@pytest.mark.parametrize("places", [[0, 1, 2, 3], [3, 1], [2]])
def test_forbidden_tokens_get_minus_infinity(vocab_size: int, share: float, places: list[int]) -> None:
    chance = np.random.default_rng(vocab_size)
    allowed = chance.random((len(places), vocab_size)) < share
    padded = np.zeros((len(places), mask_bytes(vocab_size) * 8), dtype=np.bool_)
    padded[:, :vocab_size] = allowed
    # The bits beyond the vocabulary may have any value.
    padded[:, vocab_size:] = True
    bits = np.packbits(padded, axis=1, bitorder="little").tobytes()
    logits = torch.from_numpy(chance.standard_normal((4, vocab_size)).astype(np.float32))
    expected = logits.clone()
    for place, row in zip(places, allowed, strict=True):
        expected[place, torch.from_numpy(~row)] = float("-inf")
    apply_masks(logits, TokenMasks(places=places, bits=bits))
    assert torch.equal(logits, expected)
