"""Configurations and tensor names of text parts, as in the checkpoints of the hub."""

from typing import Any

import pytest

from quire_engine.model.config import parse_config
from quire_engine.model.families import SUPPORTED
from quire_engine.model.text_part import text_config, text_tensor

GEMMA = {
    "architectures": ["Gemma3ForConditionalGeneration"],
    "eos_token_id": [1, 106],
    "text_config": {
        "hidden_size": 2560,
        "intermediate_size": 10240,
        "model_type": "gemma3_text",
        "num_hidden_layers": 34,
        "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
        "sliding_window": 1024,
    },
    "vision_config": {"hidden_size": 1152},
}
QWEN = {
    "architectures": ["Qwen2_5_VLForConditionalGeneration"],
    "vocab_size": 1000,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128_000,
    "rope_theta": 1e6,
    "rope_scaling": {"type": "mrope", "mrope_section": [16, 24, 24]},
    "tie_word_embeddings": True,
    "vision_config": {"hidden_size": 1280},
}


@pytest.mark.parametrize(
    ("raw", "expected"),
    [
        (GEMMA, ("Gemma3ForCausalLM", 262_208, 8, 4, 256, 131_072, True, (1, 106))),
        (QWEN, ("Qwen2ForCausalLM", 1000, 4, 2, 16, 128_000, True, ())),
        ({**QWEN, "rope_scaling": None}, ("Qwen2ForCausalLM", 1000, 4, 2, 16, 128_000, True, ())),
    ],
)
def test_the_decoders_own_configuration_is_found(raw: dict[str, Any], expected: tuple[object, ...]) -> None:
    problems: list[str] = []
    own = text_config(raw)
    assert own is not None
    config = parse_config(own, {}, SUPPORTED, problems)
    assert config is not None, problems
    assert expected == (
        config.architecture,
        config.vocab_size,
        config.num_heads,
        config.num_kv_heads,
        config.head_dim,
        config.max_position_embeddings,
        config.tie_word_embeddings,
        config.eos_token_ids,
    )


@pytest.mark.parametrize(
    ("architecture", "whole", "text", "tied"),
    [
        ("Mistral3ForConditionalGeneration", None, None, True),
        ("Mistral3ForConditionalGeneration", None, False, True),
        ("Mistral3ForConditionalGeneration", True, False, True),
        ("Mistral3ForConditionalGeneration", False, False, False),
        ("Mistral3ForConditionalGeneration", False, True, True),
        ("Gemma3ForConditionalGeneration", None, False, True),
        ("Gemma3ForConditionalGeneration", False, None, False),
        ("Qwen2VLForConditionalGeneration", False, True, True),
        ("Qwen2_5_VLForConditionalGeneration", None, True, True),
        ("Qwen3VLForConditionalGeneration", True, False, True),
        ("Qwen3VLForConditionalGeneration", None, False, False),
        ("Qwen3VLForConditionalGeneration", None, None, None),
    ],
)
def test_flag_of_tied_embeddings_may_be_in_either_place(
    architecture: str, whole: bool | None, text: bool | None, tied: bool | None
) -> None:
    """The flag only says that embeddings may be tied: an LM head of the checkpoint's own has precedence."""
    flags = {"tie_word_embeddings": whole, "text_config": {"tie_word_embeddings": text}}
    own = text_config({"architectures": [architecture], **flags})
    assert own is not None and own["tie_word_embeddings"] is tied


def test_a_quantized_larger_model_is_refused_as_a_whole() -> None:
    problems: list[str] = []
    own = text_config({**QWEN, "quantization_config": {"quant_method": "awq"}})
    assert own is not None and parse_config(own, {}, SUPPORTED, problems) is None
    assert "quantization_config" in problems[0]


@pytest.mark.parametrize("named", [None, [], ["LlamaForCausalLM"], "Gemma3ForConditionalGeneration", [3]])
def test_other_models_have_no_text_part(named: object) -> None:
    assert text_config({"architectures": named, "text_config": {}}) is None


@pytest.mark.parametrize(
    ("stored", "own"),
    [
        ("language_model.model.layers.0.mlp.up_proj.weight", "model.layers.0.mlp.up_proj.weight"),
        ("language_model.lm_head.weight", "lm_head.weight"),
        ("model.language_model.embed_tokens.weight", "model.embed_tokens.weight"),
        ("model.layers.0.mlp.up_proj.weight", "model.layers.0.mlp.up_proj.weight"),
        ("lm_head.weight", "lm_head.weight"),
        ("vision_tower.vision_model.post_layernorm.weight", None),
        ("model.vision_tower.ln_pre.weight", None),
        ("multi_modal_projector.linear_1.weight", None),
        ("visual.blocks.0.norm1.weight", None),
        ("model.visual.blocks.0.norm1.weight", None),
    ],
)
def test_tensors_of_the_decoder_have_its_names(stored: str, own: str | None) -> None:
    assert text_tensor(stored) == own
