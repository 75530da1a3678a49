"""The sizes that config.json gives, by family; figures that can be checked by hand or in a model's own files."""

from collections.abc import Mapping
from typing import Any

import pytest
from model_configs import LLAMA_3_8B, LLAMA_7B, config_of

from quire_common.model_memory import compute_dtype, parse_model_config, stored_dtype

MIXTRAL = {
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "num_local_experts": 8,
    "vocab_size": 32000,
}


@pytest.mark.parametrize(
    ("body", "parameters"),
    [(LLAMA_3_8B, 8_030_261_248), (LLAMA_7B, 6_738_415_616), (MIXTRAL, 46_702_792_704)],
    ids=["llama-3-8b", "llama-7b", "mixtral-8x7b"],
)
def test_parameter_counts_match_published_ones(body: Mapping[str, object], parameters: int) -> None:
    assert config_of(body).parameters == parameters


@pytest.mark.parametrize(
    ("body", "parameters"),
    [
        # Gemma 2 2B: tied embeddings without a field in the config, heads of 256 where the hidden size would give 288.
        (
            {
                "architectures": ["Gemma2ForCausalLM"],
                "hidden_size": 2304,
                "intermediate_size": 9216,
                "num_attention_heads": 8,
                "num_hidden_layers": 26,
                "num_key_value_heads": 4,
                "vocab_size": 256000,
            },
            2_614_341_888,
        ),
        # Qwen3 0.6B: heads of 128 where the hidden size would give 64.
        (
            {
                "architectures": ["Qwen3ForCausalLM"],
                "hidden_size": 1024,
                "intermediate_size": 3072,
                "num_attention_heads": 16,
                "num_hidden_layers": 28,
                "num_key_value_heads": 8,
                "tie_word_embeddings": True,
                "vocab_size": 151936,
            },
            596_049_920,
        ),
        # Qwen2 7B.
        (
            {
                "architectures": ["Qwen2ForCausalLM"],
                "hidden_size": 3584,
                "intermediate_size": 18944,
                "num_attention_heads": 28,
                "num_hidden_layers": 28,
                "num_key_value_heads": 4,
                "tie_word_embeddings": False,
                "vocab_size": 152064,
            },
            7_615_616_512,
        ),
    ],
    ids=["gemma-2-2b", "qwen3-0.6b", "qwen2-7b"],
)
def test_parameter_counts_of_variants_are_within_0_1_percent(body: Mapping[str, object], parameters: int) -> None:
    assert config_of(body).parameters == pytest.approx(parameters, rel=1e-3)


def test_multimodal_configuration_is_read_at_its_language_model() -> None:
    config = config_of({"architectures": ["Gemma3"], "dtype": "bfloat16", "text_config": LLAMA_3_8B})
    assert (config.family, config.kv_heads, config.dtype) == ("Gemma3", 8, "bfloat16")


def test_reader_never_iterates_over_billions_of_layers() -> None:
    body = {"hidden_size": 64, "num_attention_heads": 4, "num_hidden_layers": 2**31 - 1, "vocab_size": 100}
    problems = parse_model_config(body)
    assert isinstance(problems, tuple)
    assert list(problems) == ["num_hidden_layers is 2147483647; 1 to 10000 is needed"]


def test_every_missing_size_is_named() -> None:
    problems = parse_model_config({"hidden_size": "big", "num_attention_heads": 0})
    assert isinstance(problems, tuple)
    assert {problem.split()[0] for problem in problems} == {
        "hidden_size",
        "num_attention_heads",
        "num_hidden_layers",
        "vocab_size",
    }


@pytest.mark.parametrize(
    ("asked", "stored", "device", "fast", "quantization", "dtype"),
    [
        ("auto", "bfloat16", "gpu", False, None, "bfloat16"),
        ("auto", "float16", "gpu", False, None, "float16"),
        ("auto", "float16", "gpu", False, "fp8", "bfloat16"),
        ("auto", "float32", "gpu", False, None, "bfloat16"),
        ("auto", None, "gpu", False, None, "bfloat16"),
        ("auto", "bfloat16", "cpu", False, None, "float32"),
        ("auto", "bfloat16", "cpu", True, None, "bfloat16"),
        ("float16", "bfloat16", "cpu", True, None, "float16"),
    ],
)
def test_arithmetic(asked: Any, stored: Any, device: Any, fast: bool, quantization: str | None, dtype: str) -> None:
    found = compute_dtype(asked, stored, device=device, cpu_multiplies_bfloat16=fast, quantization=quantization)
    assert found == dtype


SMALL = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 7,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
}


@pytest.mark.parametrize(
    ("family", "fields", "windows"),
    [
        ("LlamaForCausalLM", {"sliding_window": 5}, [None] * 7),
        ("MistralForCausalLM", {}, [4096] * 7),
        ("MistralForCausalLM", {"sliding_window": None}, [None] * 7),
        ("MixtralForCausalLM", {"num_local_experts": 4, "sliding_window": 9}, [9] * 7),
        ("MixtralForCausalLM", {"num_local_experts": 4}, [None] * 7),
        ("Qwen2ForCausalLM", {"use_sliding_window": True, "max_window_layers": 3}, [None] * 3 + [4096] * 4),
        ("Qwen2ForCausalLM", {"use_sliding_window": True}, [None] * 7),
        ("Qwen3MoeForCausalLM", {"num_experts": 4, "use_sliding_window": True, "sliding_window": 9}, [9] * 7),
        ("Gemma2ForCausalLM", {"layer_types": ["full_attention"] * 7}, [None] * 7),
        ("Gemma3ForCausalLM", {}, [4096] * 5 + [None, 4096]),
        ("GptOssForCausalLM", {"num_local_experts": 4}, [128, None] * 3 + [128]),
        ("Gemma4ForCausalLM", {}, [512] * 5 + [None, None]),
        ("Llama4ForCausalLM", {}, [8192] * 3 + [None] + [8192] * 3),
        (
            "Llama4ForCausalLM",
            {"attention_chunk_size": 9, "layer_types": ["chunked_attention"] * 6 + ["full_attention"]},
            [9] * 6 + [None],
        ),
    ],
)
def test_windows_follow_the_rules_of_the_family(family: str, fields: dict[str, Any], windows: list[int | None]) -> None:
    assert config_of({**SMALL, "architectures": [family], **fields}).windows == tuple(windows)


def test_text_part_has_the_rules_and_omitted_values_of_its_family() -> None:
    """The config.json of Gemma 3 4B has neither heads nor a vocabulary."""
    text = {"hidden_size": 2560, "intermediate_size": 10240, "num_hidden_layers": 34, "sliding_window": 1024}
    config = config_of({"architectures": ["Gemma3ForConditionalGeneration"], "text_config": text})
    assert (config.heads, config.kv_heads, config.head_dim, config.vocab_size) == (8, 4, 256, 262_208)
    assert config.windows == ((1024,) * 5 + (None,)) * 5 + (1024,) * 4
    assert (config.family, config.tied_embeddings) == ("Gemma3ForConditionalGeneration", True)
    assert config.max_positions == 131_072


def test_headless_decoder_has_the_rules_of_its_family() -> None:
    assert config_of({**SMALL, "architectures": ["Qwen3Model"]}).head_dim == 128
    assert config_of({**SMALL, "architectures": ["OtherModel"]}).head_dim == 8


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"num_key_value_heads": 3}, "num_key_value_heads"),
        ({"vocab_size": 2**31}, "vocab_size"),
        ({"text_config": 3}, "text_config"),
        ({"architectures": ["Gemma2ForCausalLM"], "layer_types": ["full_attention"]}, "layer_types"),
        ({"per_layer_config": {"2": {"head_dim": 0}}}, "per_layer_config.2.head_dim"),
    ],
)
def test_unusable_fields_are_named(changes: dict[str, Any], field: str) -> None:
    problems = parse_model_config({**SMALL, **changes})
    assert isinstance(problems, tuple) and field in problems[0]


@pytest.mark.parametrize("stored", ["float32", "float16", "bfloat16"])
def test_stored_dtype_is_found_under_all_its_names(stored: str) -> None:
    for raw in ({"dtype": stored}, {"torch_dtype": stored}, {"text_config": {"dtype": stored}}):
        assert stored_dtype(raw) == stored
    assert stored_dtype({"dtype": "int8"}) is None
