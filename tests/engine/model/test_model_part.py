"""The division of a model among ranks: what each reads of a tensor, and the sizes that are refused."""

from collections import Counter
from math import prod
from typing import Any

import pytest

from quire_engine.model.config import ModelConfig, parse_config
from quire_engine.model.decoder import find_family
from quire_engine.model.families import SUPPORTED
from quire_engine.model.model_part import ModelPart, divided, part_problems

LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 101,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "rope_theta": 10_000.0,
    "attention_bias": True,
    "mlp_bias": True,
}
MIXTRAL = {
    **LLAMA,
    "architectures": ["MixtralForCausalLM"],
    "num_local_experts": 3,
    "num_experts_per_tok": 2,
    "attention_bias": False,
    "mlp_bias": False,
}
PHI3 = {**LLAMA, "architectures": ["Phi3ForCausalLM"], "attention_bias": False, "mlp_bias": False}


def config_of(**fields: Any) -> ModelConfig:
    problems: list[str] = []
    config = parse_config(fields, {}, SUPPORTED, problems)
    assert config is not None, problems
    return config


@pytest.mark.parametrize("raw", [LLAMA, MIXTRAL, PHI3], ids=["llama", "mixtral", "phi3"])
@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_ranks_read_every_element_of_the_model(raw: dict[str, Any], ranks: int) -> None:
    """Each element of a divided tensor is read by one rank, and those of a KV head by all ranks that share it."""
    config = config_of(**raw)
    family = find_family(config.architecture)
    copies = max(1, ranks // config.num_kv_heads)
    for name, shape in family.tensor_shapes(config, ()).items():
        read: Counter[int] = Counter()
        for rank in range(ranks):
            split = family.split(config, ModelPart(tensor_rank=rank, tensor_size=ranks), name)
            if split is None or split.is_zero:
                continue
            for begin, end in split.spans:
                read.update(range(begin, end))
        if not read:
            assert "norm" in name or "gate.weight" in name, name
            continue
        length = shape[0] if len(read) == shape[0] else shape[1]
        assert sorted(read) == list(range(length)), name
        assert set(read.values()) <= {1, copies}, name


@pytest.mark.parametrize("raw", [LLAMA, MIXTRAL, PHI3], ids=["llama", "mixtral", "phi3"])
def test_a_rank_of_two_reads_little_more_than_half(raw: dict[str, Any]) -> None:
    config = config_of(**raw)
    family = find_family(config.architecture)
    part = ModelPart(tensor_rank=1, tensor_size=2)
    whole = own = 0
    for name, shape in family.tensor_shapes(config, ()).items():
        split = family.split(config, part, name)
        whole += prod(shape)
        own += prod(shape if split is None else split.shape(shape))
    assert own <= 0.55 * whole


def test_the_split_shapes_fit_the_divided_configuration() -> None:
    config = config_of(**LLAMA)
    family = find_family(config.architecture)
    part = ModelPart(tensor_rank=3, tensor_size=4)
    own = divided(config, part)
    assert (own.num_heads, own.num_kv_heads, own.intermediate_size) == (2, 1, 24)
    expected = family.tensor_shapes(own, ())
    for name, shape in family.tensor_shapes(config, ()).items():
        split = family.split(config, part, name)
        found = shape if split is None else split.shape(shape)
        if name in ("model.embed_tokens.weight", "lm_head.weight"):
            assert found == (26, 64)
        else:
            assert found == expected[name], name


def test_stacked_experts_are_divided_equally() -> None:
    config = config_of(**MIXTRAL)
    family = find_family(config.architecture)
    part = ModelPart(tensor_rank=1, tensor_size=2)
    fused = {
        "model.layers.0.mlp.experts.gate_up_proj": (3, 192, 64),
        "model.layers.0.mlp.experts.down_proj": (3, 64, 96),
    }
    shapes = {name: family.split(config, part, name).shape(shape) for name, shape in fused.items()}  # type: ignore[union-attr]
    assert list(shapes.values()) == [(3, 96, 64), (3, 64, 48)]


@pytest.mark.parametrize(
    ("changes", "ranks", "parts"),
    [
        ({}, 2, []),
        ({}, 8, []),
        ({}, 3, ["does not divide the model's 8 attention heads (num_attention_heads): use 1, 2, 4 or 8"]),
        (
            {"num_attention_heads": 12, "num_key_value_heads": 4, "hidden_size": 96},
            6,
            ["4 KV heads", "use 1, 2, 4 or 12"],
        ),
        ({"intermediate_size": 97}, 2, ["does not divide 97 (intermediate_size)"]),
    ],
)
def test_sizes_that_do_not_divide_are_refused(changes: dict[str, Any], ranks: int, parts: list[str]) -> None:
    problems = part_problems(config_of(**(LLAMA | changes)), tensor=ranks)
    if not parts:
        assert problems == []
    assert all(any(part in problem for problem in problems) for part in parts), problems


def test_expert_size_must_be_divisible() -> None:
    config = config_of(**{**MIXTRAL, "intermediate_size": 90})
    assert any("90 (the intermediate size of an expert)" in problem for problem in part_problems(config, tensor=4))
