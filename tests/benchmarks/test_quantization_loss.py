"""The measure of what rounded weights cost: on a small model, int8 stays near float32 and is told from it."""

from pathlib import Path

import pytest
import torch
from quantization_loss import Loss, load, logits_of, measure, random_texts, variants
from transformers import LlamaConfig, LlamaForCausalLM


@pytest.fixture(scope="module")
def losses(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Loss]:
    folder: Path = tmp_path_factory.mktemp("model")
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=500,
        max_position_embeddings=256,
    )
    model = LlamaForCausalLM(config).eval()
    with torch.no_grad():  # spread out as a trained model's logits are, so that choices are not all ties
        model.lm_head.weight *= 20.0
    model.save_pretrained(folder)
    texts = random_texts(500, 3)
    reference = [logits_of(model, ids) for ids in texts]
    return {name: measure(load(folder, dtype, backend), reference, texts) for name, dtype, backend in variants()}


def test_float32_is_what_the_others_are_measured_against(losses: dict[str, Loss]) -> None:
    exact = losses["float32"]
    assert exact.logits_error < 1e-4 and exact.same_choice > 0.99 and abs(exact.divergence) < 1e-5


@pytest.mark.parametrize("name", ["int8, float32 activations", "int8, bfloat16 activations"])
def test_int8_stays_near_float32(name: str, losses: dict[str, Loss]) -> None:
    exact, int8 = losses["float32"], losses[name]
    assert 1e-3 < int8.logits_error < 0.06
    assert int8.same_choice > 0.85 and 0.0 < int8.divergence < 0.05
    assert int8.perplexity == pytest.approx(exact.perplexity, rel=0.1)
