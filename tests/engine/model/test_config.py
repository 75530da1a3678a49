"""config.json of a model folder: the parsed values, and all errors at once."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from quire_engine.errors import ModelFolderError
from quire_engine.model.config import ModelConfig, load_config, parse_config
from quire_engine.model.experts import ExpertsConfig
from quire_engine.model.families import SUPPORTED
from quire_engine.model.rope import RopeConfig
from quire_engine.model.shape import without_idle_windows

BASE: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 100,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 128,
}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}


def parse(raw: dict[str, Any], generation: dict[str, Any] | None = None) -> tuple[ModelConfig | None, list[str]]:
    problems: list[str] = []
    return parse_config(raw, generation or {}, SUPPORTED, problems), problems


def parsed(generation: dict[str, Any] | None = None, **changes: Any) -> ModelConfig:
    config, problems = parse({**BASE, **changes}, generation)
    assert config is not None, problems
    return config


def test_missing_fields_get_the_defaults_of_the_family() -> None:
    config = parsed()
    assert (config.num_kv_heads, config.head_dim, config.rms_norm_eps) == (4, 16, 1e-6)
    assert (config.tie_word_embeddings, config.attention_bias, config.mlp_bias) == (False, False, False)
    assert (config.ropes[0].theta, config.ropes[0].scaling, config.eos_token_ids) == (10_000.0, None, ())


def test_given_fields_override_defaults() -> None:
    config = parsed(
        num_key_value_heads=2, head_dim=32, rms_norm_eps=1e-5, tie_word_embeddings=True, attention_bias=True
    )
    assert (config.num_kv_heads, config.head_dim, config.rms_norm_eps) == (2, 32, 1e-5)
    assert (config.tie_word_embeddings, config.attention_bias) == (True, True)


@pytest.mark.parametrize(
    ("changes", "windows"),
    [
        ({"architectures": ["LlamaForCausalLM"], "sliding_window": 8}, (None, None, None)),
        ({"architectures": ["MistralForCausalLM"], "sliding_window": 8}, (8, 8, 8)),
        ({"architectures": ["MistralForCausalLM"], "sliding_window": None}, (None, None, None)),
        ({"architectures": ["Phi3ForCausalLM"], "sliding_window": 2047}, (2047, 2047, 2047)),
        ({"architectures": ["Qwen2ForCausalLM"], "sliding_window": 8}, (None, None, None)),
        ({"architectures": ["Gemma2ForCausalLM"], "sliding_window": 8}, (8, None, 8)),
        ({"architectures": ["Gemma3ForCausalLM"], "sliding_window": 8, "sliding_window_pattern": 3}, (8, 8, None)),
        (
            {
                "architectures": ["Gemma3ForCausalLM"],
                "layer_types": ["full_attention", "sliding_attention", "full_attention"],
            },
            (None, 4096, None),
        ),
        (
            {"architectures": ["Qwen2ForCausalLM"], "sliding_window": 8, "use_sliding_window": True},
            (None, None, None),
        ),
        (
            {
                "architectures": ["Qwen3ForCausalLM"],
                "sliding_window": 8,
                "use_sliding_window": True,
                "max_window_layers": 1,
            },
            (None, 8, 8),
        ),
        (
            {
                "architectures": ["Qwen3ForCausalLM"],
                "sliding_window": 8,
                "use_sliding_window": True,
                "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
            },
            (8, None, 8),
        ),
    ],
)
def test_windowed_layers_are_read_by_architecture(changes: dict[str, Any], windows: tuple[int | None, ...]) -> None:
    assert parsed(num_hidden_layers=3, **changes).windows == windows


def test_window_of_full_context_shares_full_block_tables() -> None:
    config = replace(parsed(), windows=(8, None, 100))
    assert config.kv_groups == (8, None, 100)
    assert without_idle_windows(config, 100).windows == (8, None, None)
    assert without_idle_windows(config, 8).kv_groups == (None,)


def test_gemma_2_has_its_own_defaults() -> None:
    config = parsed(architectures=["Gemma2ForCausalLM"])
    assert (config.head_dim, config.tie_word_embeddings, config.attention_scale) == (256, True, 1 / 16)
    assert (config.attention_soft_cap, config.logit_soft_cap) == (50.0, 30.0)
    uncapped = parsed(
        architectures=["Gemma2ForCausalLM"],
        attn_logit_softcapping=None,
        final_logit_softcapping=None,
        query_pre_attn_scalar=64,
    )
    assert (uncapped.attention_soft_cap, uncapped.logit_soft_cap, uncapped.attention_scale) == (None, None, 1 / 8)


def test_gemma_3_uses_another_rope_in_windowed_layers() -> None:
    config = parsed(architectures=["Gemma3ForCausalLM"], sliding_window=8, sliding_window_pattern=2)
    assert config.ropes == (RopeConfig(theta=1e4), RopeConfig(theta=1e6))
    # It also applies if the window hides nothing.
    assert without_idle_windows(config, 8).ropes == config.ropes


def test_phi3_may_rotate_part_of_a_head() -> None:
    assert parsed(architectures=["Phi3ForCausalLM"], partial_rotary_factor=0.75).rotary_dim == 12
    assert parsed(architectures=["Phi3ForCausalLM"], rope_parameters={"partial_rotary_factor": 0.5}).rotary_dim == 8
    assert parsed(partial_rotary_factor=0.5).rotary_dim == 16


def test_mixtral_has_experts_in_every_layer() -> None:
    config = parsed(architectures=["MixtralForCausalLM"])
    assert config.experts == ExpertsConfig(
        num_experts=8, experts_per_token=2, intermediate_size=96, normalise_weights=True, in_layer=(True, True)
    )
    assert (config.ropes[0].theta, config.rms_norm_eps) == (1e6, 1e-5)
    assert parsed(architectures=["MixtralForCausalLM"], sliding_window=8).windows == (8, 8)
    assert parsed().experts is None


@pytest.mark.parametrize(
    ("changes", "in_layer"),
    [
        ({}, (True, True, True, True)),
        ({"decoder_sparse_step": 2}, (False, True, False, True)),
        ({"mlp_only_layers": [0, 3]}, (False, True, True, False)),
        ({"decoder_sparse_step": 2, "mlp_only_layers": [1]}, (False, False, False, True)),
        ({"mlp_only_layers": None}, (True, True, True, True)),
    ],
)
def test_qwen3_moe_config_selects_layers_with_experts(changes: dict[str, Any], in_layer: tuple[bool, ...]) -> None:
    config = parsed(architectures=["Qwen3MoeForCausalLM"], num_hidden_layers=4, moe_intermediate_size=32, **changes)
    assert config.experts == ExpertsConfig(
        num_experts=128, experts_per_token=8, intermediate_size=32, normalise_weights=False, in_layer=in_layer
    )


def test_qwen3_moes_experts_may_be_counted_under_either_name() -> None:
    config = parsed(architectures=["Qwen3MoeForCausalLM"], num_local_experts=16, norm_topk_prob=True)
    assert config.experts is not None
    assert (config.experts.num_experts, config.experts.normalise_weights) == (16, True)


@pytest.mark.parametrize(
    ("config", "generation", "ids"),
    [
        ({"eos_token_id": 5}, {}, (5,)),
        ({"eos_token_id": [5, 6]}, {}, (5, 6)),
        ({"eos_token_id": 5}, {"eos_token_id": [7, 8]}, (7, 8)),
        ({"eos_token_id": 5}, {"eos_token_id": None}, (5,)),
        ({"eos_token_id": None}, {}, ()),
    ],
)
def test_generation_config_names_the_tokens_that_end_a_turn(
    config: dict[str, Any], generation: dict[str, Any], ids: tuple[int, ...]
) -> None:
    assert parsed(generation, **config).eos_token_ids == ids


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        (
            {"architectures": ["BertModel"]},
            "architecture BertModel is not supported; supported: Gemma2ForCausalLM, Gemma3ForCausalLM",
        ),
        (
            {"architectures": None},
            "architectures is None; a list with one of Gemma2ForCausalLM, Gemma3ForCausalLM, LlamaForCausalLM",
        ),
        ({"vocab_size": None}, "vocab_size is missing; a whole number above 0 is needed"),
        ({"hidden_size": "64"}, "hidden_size is '64'; a whole number above 0 is needed"),
        ({"num_hidden_layers": 0}, "num_hidden_layers is 0; 1 to 10000 is needed"),
        ({"num_hidden_layers": True}, "num_hidden_layers is True; 1 to 10000 is needed"),
        ({"num_hidden_layers": 10**9}, "num_hidden_layers is 1000000000; 1 to 10000 is needed"),
        ({"num_key_value_heads": 3}, "num_attention_heads 4 is not a multiple of num_key_value_heads 3"),
        ({"hidden_size": 66}, "hidden_size 66 is not a multiple of num_attention_heads 4; head_dim is not given"),
        ({"head_dim": 15}, "head_dim 15 is odd; rotary position embedding pairs its components"),
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu'; supported: silu"),
        ({"rms_norm_eps": -1}, "rms_norm_eps is -1; a number above 0 is needed"),
        ({"tie_word_embeddings": "yes"}, "tie_word_embeddings is 'yes'; true or false is needed"),
        ({"eos_token_id": "</s>"}, "eos_token_id is '</s>'; a token id or a list of them is needed"),
        ({"quantization_config": {"bits": 4}}, "quantization_config is given; only checkpoints in 16 or 32 bits"),
        (
            {"rope_scaling": {"rope_type": "ntk"}},
            "rope_scaling.rope_type is 'ntk'; supported: default, linear, dynamic, llama3, yarn, longrope",
        ),
        (
            {
                "architectures": ["Phi3ForCausalLM"],
                "rope_scaling": {"type": "longrope", "short_factor": [1] * 8, "long_factor": [1] * 7},
                "original_max_position_embeddings": 64,
            },
            "long_factor has 7 numbers; 8 are needed, one for two of the 16 components of a head that are rotated",
        ),
        (
            {"architectures": ["MixtralForCausalLM"], "num_local_experts": 4, "num_experts_per_tok": 5},
            "num_experts_per_tok 5 is more than num_local_experts 4; at most all are chosen",
        ),
        (
            {"architectures": ["Qwen3MoeForCausalLM"], "num_experts": 4, "num_experts_per_tok": 5},
            "num_experts_per_tok 5 is more than num_experts 4; at most all are chosen",
        ),
        (
            {"architectures": ["Qwen3MoeForCausalLM"], "mlp_only_layers": [0, 2]},
            "mlp_only_layers is [0, 2]; a list of whole numbers from 0 to 1 is needed",
        ),
        (
            {"architectures": ["Qwen3MoeForCausalLM"], "decoder_sparse_step": 0},
            "decoder_sparse_step is 0; a whole number above 0 is needed",
        ),
        (
            {"architectures": ["MistralForCausalLM"], "sliding_window": -1},
            "sliding_window is -1; a whole number above 0 is needed",
        ),
        (
            {
                "architectures": ["Qwen3ForCausalLM"],
                "use_sliding_window": True,
                "layer_types": ["full_attention", "chunked_attention"],
            },
            "layer_types is ['full_attention', 'chunked_attention']; a list of 2 of full_attention, sliding_attention",
        ),
        (
            {"architectures": ["Gemma2ForCausalLM"], "hidden_activation": "relu"},
            "hidden_activation is 'relu'; supported: gelu_pytorch_tanh",
        ),
        (
            {"architectures": ["Gemma2ForCausalLM"], "attn_logit_softcapping": 0},
            "attn_logit_softcapping is 0; a number above 0 is needed",
        ),
        (
            {"architectures": ["Gemma3ForCausalLM"], "use_bidirectional_attention": True},
            "use_bidirectional_attention is set; only causal models are supported",
        ),
        (
            {"architectures": ["Phi3ForCausalLM"], "partial_rotary_factor": 2},
            "partial_rotary_factor is 2.0; at most 1 is needed",
        ),
        (
            {"architectures": ["Phi3ForCausalLM"], "partial_rotary_factor": 0.2},
            "partial_rotary_factor makes 3 components rotate; an even number of them is needed",
        ),
        ({"rope_scaling": "linear"}, "rope_scaling is 'linear'; an object is needed"),
        ({"rope_parameters": {"rope_type": "linear"}}, "rope_parameters.factor is missing; a number above 0 is needed"),
        (
            {"rope_parameters": {**LLAMA3, "low_freq_factor": 4.0}},
            "rope_parameters.low_freq_factor 4.0 is not below rope_parameters.high_freq_factor 4.0",
        ),
    ],
)
def test_wrong_field_is_reported_with_a_valid_value(changes: dict[str, Any], problem: str) -> None:
    config, problems = parse({**BASE, **changes})
    assert config is None
    assert [found for found in problems if problem in found], problems


def test_config_problem_is_reported_once_in_one_line() -> None:
    _, problems = parse({**BASE, "architectures": ["MixtralForCausalLM"], "intermediate_size": None})
    assert problems == ["intermediate_size is missing; a whole number above 0 is needed"]
    layers = ["full_attention"] * 200
    _, problems = parse({**BASE, "architectures": ["Gemma2ForCausalLM"], "layer_types": layers})
    assert len(problems) == 1 and len(problems[0]) < 300


def write_folder(folder: Path, config: object, generation: object | None = None) -> Path:
    (folder / "config.json").write_text(config if isinstance(config, str) else json.dumps(config))
    if generation is not None:
        (folder / "generation_config.json").write_text(json.dumps(generation))
    return folder


def test_model_folder_is_read(tmp_path: Path) -> None:
    assert load_config(write_folder(tmp_path, BASE, {"eos_token_id": 3}), SUPPORTED).eos_token_ids == (3,)


def test_every_problem_is_listed_at_once(tmp_path: Path) -> None:
    folder = write_folder(tmp_path, {"architectures": ["BertModel"], "num_attention_heads": 0})
    with pytest.raises(ModelFolderError) as raised:
        load_config(folder, SUPPORTED)
    message = str(raised.value)
    assert message.startswith(f"{folder / 'config.json'} cannot be served:")
    for name in (
        "BertModel",
        "vocab_size",
        "hidden_size",
        "intermediate_size",
        "num_hidden_layers",
        "num_attention_heads",
    ):
        assert name in message
    assert message.count("\n  - ") == 7


@pytest.mark.parametrize(
    ("content", "message"),
    [(None, "has no config.json"), ("{", "cannot be read as JSON"), ("[]", "contains list instead of a JSON object")],
)
def test_a_folder_without_a_readable_config_is_refused(tmp_path: Path, content: str | None, message: str) -> None:
    if content is not None:
        write_folder(tmp_path, content)
    with pytest.raises(ModelFolderError, match=message):
        load_config(tmp_path, SUPPORTED)


def test_path_that_is_not_a_folder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelFolderError, match="is not a folder"):
        load_config(tmp_path / "absent", SUPPORTED)
