"""Rotary frequencies against transformers', which reads the same config.json."""

import pytest
import torch
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from quire_engine.model.rope import inverse_frequencies, parse_rope


@pytest.mark.parametrize(
    "parameters",
    [
        {"rope_type": "default", "rope_theta": 10_000.0},
        {"rope_type": "linear", "rope_theta": 10_000.0, "factor": 4.0},
        {
            "rope_type": "llama3",
            "rope_theta": 500_000.0,
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        },
    ],
    ids=lambda parameters: parameters["rope_type"],
)
def test_frequencies_equal_transformers(parameters: dict[str, object]) -> None:
    config = LlamaConfig(hidden_size=256, num_attention_heads=2, rope_parameters=parameters)
    problems: list[str] = []
    rope = parse_rope(config.to_dict(), problems)
    assert not problems
    expected = LlamaRotaryEmbedding(config).inv_freq
    torch.testing.assert_close(torch.tensor(inverse_frequencies(rope, 128)), expected, rtol=1e-6, atol=0.0)
