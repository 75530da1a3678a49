"""The scales of a float8 KV cache in a checkpoint: their names, values, and the configuration that announces them."""

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from quire_engine.errors import ModelFolderError
from quire_engine.model.candidate import BuildOptions
from quire_engine.model.divided import Links, OneRank
from quire_engine.model.kv_scales import (
    KVScales,
    is_kv_scale,
    only_quantizes_kv_cache,
    read_kv_scales,
    scales_in_words,
    set_kv_scales,
)
from quire_engine.model.linear.backends import TorchLinearBackend
from quire_engine.model.loader import find_native_candidate
from quire_engine.model.model_part import ModelPart
from quire_kernels.kv_cache import FP8, KVCache

DEMO = Path(__file__).parents[3] / "examples" / "models" / "quire-demo"
SCHEME = {"num_bits": 8, "type": "float", "dynamic": False, "strategy": "tensor"}
ANNOUNCED = {"quant_method": "compressed-tensors", "config_groups": {}, "kv_cache_scheme": SCHEME}


class Tensors:
    def __init__(self, tensors: dict[str, Tensor]) -> None:
        self.tensors = tensors

    def read(self, name: str, /) -> Tensor:
        return self.tensors[name]


def scales_of(tensors: dict[str, Any], layers: int = 1) -> tuple[KVScales, ...]:
    made = {name: torch.as_tensor(value) for name, value in tensors.items()}
    return read_kv_scales(made.keys(), Tensors(made), range(layers))


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("model.layers.0.self_attn.k_scale", True),
        ("model.layers.31.self_attn.v_scale", True),
        ("model.layers.31.self_attn.v_proj.v_scale", True),
        ("model.layers.31.self_attn.v_proj.k_scale", False),
        ("model.layers.0.self_attn.q_scale", False),
        ("model.layers.0.mlp.down_proj.weight_scale", False),
        ("x.model.layers.0.self_attn.k_scale", False),
    ],
)
def test_names_of_scales(name: str, expected: bool) -> None:
    assert is_kv_scale(name) == expected


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({}, True),
        ({"config_groups": None}, True),
        ({"config_groups": {"group_0": {"weights": {"num_bits": 4}}}}, False),
        ({"quant_method": "fp8"}, False),
        ({"kv_cache_scheme": None}, False),
        ({"kv_cache_scheme": {**SCHEME, "num_bits": 4}}, False),
        ({"kv_cache_scheme": {**SCHEME, "type": "int"}}, False),
        ({"kv_cache_scheme": {**SCHEME, "dynamic": True}}, False),
    ],
)
def test_only_a_quantized_kv_cache_is_accepted(change: dict[str, Any], expected: bool) -> None:
    assert only_quantizes_kv_cache({**ANNOUNCED, **change}) == expected
    assert not only_quantizes_kv_cache([])


def test_scales_of_either_name_and_shape_are_read() -> None:
    found = scales_of(
        {
            "model.layers.0.self_attn.k_scale": [0.5],
            "model.layers.0.self_attn.v_scale": 2.0,
            "model.layers.1.self_attn.k_proj.k_scale": 0.25,
            "model.layers.1.self_attn.v_proj.v_scale": [4.0],
            "model.norm.weight": [1.0, 1.0],
        },
        layers=2,
    )
    assert found == (KVScales(key=0.5, value=2.0), KVScales(key=0.25, value=4.0))
    assert scales_of({"model.norm.weight": [1.0]}) == ()


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ([1.0, 1.0], r"k_scale has shape \[2\]; one scale for all heads is supported"),
        (0.0, "k_scale is 0; a scale is above 0"),
        (-1.0, "k_scale is -1; a scale is above 0"),
        (float("inf"), "k_scale is inf; a scale is above 0"),
        (None, "k_scale is missing"),
    ],
)
def test_other_scales_are_refused(value: Any, message: str) -> None:
    tensors = {"model.layers.0.self_attn.k_scale": value, "model.layers.0.self_attn.v_scale": 1.0}
    with pytest.raises(ModelFolderError, match=message):
        scales_of({name: number for name, number in tensors.items() if number is not None})


def test_only_float8_caches_get_scales() -> None:
    def cache(dtype: torch.dtype) -> KVCache:
        empty = torch.zeros(1, 2, 16, 16, dtype=dtype)
        layout: dict[str, Any] = {"num_blocks": 1, "block_size": 16, "kv_heads": 2, "head_dim": 16}
        scales = [torch.ones(2) if dtype == FP8 else None for _ in range(2)]
        return KVCache(
            keys=empty, values=empty, **layout, keys_transposed=False, key_scale=scales[0], value_scale=scales[1]
        )

    caches = cache(FP8), cache(torch.bfloat16)
    set_kv_scales(caches, (KVScales(key=0.5, value=2.0), KVScales(key=1.0, value=1.0)))
    assert caches[0].key_scale is not None and caches[0].value_scale is not None
    assert caches[0].key_scale.tolist() == [0.5, 0.5] and caches[0].value_scale.tolist() == [2.0, 2.0]
    set_kv_scales(caches, ())
    assert caches[0].key_scale.tolist() == [0.5, 0.5]


def test_a_checkpoint_with_scales_is_loaded(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    shutil.copytree(DEMO, folder)
    content = load_file(folder / "model.safetensors")
    config = json.loads((folder / "config.json").read_text())
    layers = config["num_hidden_layers"]
    for layer in range(layers):
        content[f"model.layers.{layer}.self_attn.k_scale"] = torch.tensor([0.5 + layer])
        content[f"model.layers.{layer}.self_attn.v_scale"] = torch.tensor([2.0])
    save_file(content, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps({**config, "quantization_config": ANNOUNCED}))
    options = BuildOptions(
        load_format="safetensors", seed=0, dtype=torch.float32, backend=TorchLinearBackend(torch.float32)
    )
    candidate = find_native_candidate(folder)
    scales = tuple(KVScales(key=0.5 + layer, value=2.0) for layer in range(layers))
    assert candidate.build(options).kv_scales == scales
    assert scales_in_words(scales) == "the scales of the checkpoint" and "scale of 1" in scales_in_words(())
    last = ModelPart(stage=1, stages=2)
    part = candidate.divided(last).build(replace(options, links=Links(part=last, tensor=OneRank())))
    assert part.kv_scales == scales[layers // 2 :], "a stage has those of its own layers"
