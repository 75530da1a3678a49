"""Reading adapters in PEFT's layout: what is read, and what is refused, by name and with a reason."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from adapter_support.folders import make_adapter
from safetensors.torch import load_file, save_file

from quire_common.contract.adapters_file import AdapterFailure
from quire_engine.errors import AdapterError
from quire_engine.model.adapters.peft import read_adapter

Q, DOWN = "model.layers.0.self_attn.q_proj", "model.layers.0.mlp.down_proj"
SHAPES = {Q: (32, 16), DOWN: (16, 48)}
INVALID, WRONG_BASE, RANK = AdapterFailure.INVALID, AdapterFailure.WRONG_BASE, AdapterFailure.RANK_TOO_HIGH


def read(folder: Path, **options: Any) -> Any:
    return read_adapter(folder, SHAPES, **{"max_rank": 16, "dtype": torch.float32} | options)


def test_matrices_are_scaled_and_transposed(tmp_path: Path) -> None:
    make_adapter(tmp_path, SHAPES, rank=4, alpha=8.0)
    stored = load_file(tmp_path / "adapter_model.safetensors")
    found = read(tmp_path)
    assert found.rank == 4 and set(found.modules) == {Q, DOWN}
    torch.testing.assert_close(found.modules[Q].a, stored[f"base_model.model.{Q}.lora_A.weight"])
    torch.testing.assert_close(found.modules[Q].b, 2.0 * stored[f"base_model.model.{Q}.lora_B.weight"].t())
    assert found.num_bytes == 4 * 4 * (16 + 32 + 48 + 16)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_matrices_get_the_type_of_the_model(tmp_path: Path, dtype: torch.dtype) -> None:
    assert {module.a.dtype for module in read(make_adapter(tmp_path, SHAPES), dtype=dtype).modules.values()} == {dtype}


@pytest.mark.parametrize(
    "spelling",
    [
        lambda name: name.replace(".weight", ".default.weight"),
        lambda name: name.replace("base_model.model.model.", "base_model.model.model.language_model."),
        lambda name: name.replace("base_model.model.model.", "base_model.model.language_model.model."),
        lambda name: name.removeprefix("base_model.model."),
    ],
)
def test_alternative_module_names_are_recognized(tmp_path: Path, spelling: Callable[[str], str]) -> None:
    make_adapter(tmp_path, SHAPES)
    file = tmp_path / "adapter_model.safetensors"
    save_file({spelling(name): tensor for name, tensor in load_file(file).items()}, file)
    assert set(read(tmp_path).modules) == {Q, DOWN}


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"peft_type": "LOHA"}, "peft_type is 'LOHA'"),
        ({"use_dora": True}, "DoRA"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save"),
        ({"bias": "all"}, "bias 'all'"),
        ({"lora_bias": True}, "lora_bias"),
        ({"fan_in_fan_out": True}, "fan_in_fan_out"),
        ({"trainable_token_indices": [5]}, "trainable_token_indices"),
        ({"target_parameters": ["experts.down_proj"]}, "target_parameters|targets parameters of experts"),
        ({"init_lora_weights": "pissa_niter_4"}, "pissa_niter_4"),
        ({"r": 0}, "r is 0"),
        ({"r": "8"}, "r is '8'"),
        ({"lora_alpha": None}, "lora_alpha is None"),
        ({"lora_alpha": float("nan")}, "lora_alpha is nan"),
        ({"rank_pattern": [4]}, "rank_pattern is list"),
        ({"rank_pattern": {"q_proj": -1}}, "rank_pattern\\['q_proj'\\] is -1"),
        ({"rank_pattern": {"(": 4}}, "not a regular expression"),
        ({"alpha_pattern": {"(a+)+b": 4}}, "too complex"),
        ({"rank_pattern": {"x" * 300: 4}}, "too complex"),
        ({"r": 8}, "rank 4, and adapter_config.json says 8"),
    ],
)
def test_a_configuration_that_cannot_be_served_is_named(tmp_path: Path, fields: dict[str, Any], words: str) -> None:
    make_adapter(tmp_path, SHAPES)
    config = json.loads((tmp_path / "adapter_config.json").read_text())
    (tmp_path / "adapter_config.json").write_text(json.dumps({**config, **fields}))
    with pytest.raises(AdapterError, match=words) as error:
        read(tmp_path)
    assert error.value.reason is INVALID


def tensors(change: Callable[[dict[str, torch.Tensor]], None]) -> Callable[[Path], None]:
    def apply(folder: Path) -> None:
        file = folder / "adapter_model.safetensors"
        found = load_file(file)
        change(found)
        save_file(found, file)

    return apply


def name_of(module: str, half: str) -> str:
    return f"base_model.model.{module}.lora_{half}.weight"


def renamed(before: str, after: str) -> Callable[[Path], None]:
    def change(found: dict[str, torch.Tensor]) -> None:
        for name in [name for name in found if before in name]:
            found[name.replace(before, after)] = found.pop(name)

    return tensors(change)


@pytest.mark.parametrize(
    ("damage", "reason", "words"),
    [
        (lambda folder: (folder / "adapter_config.json").unlink(), INVALID, "has no adapter_config.json"),
        (lambda folder: (folder / "adapter_config.json").write_text("{"), INVALID, "cannot be read as JSON"),
        (lambda folder: (folder / "adapter_config.json").write_text("[]"), INVALID, "list instead of a JSON object"),
        (lambda folder: (folder / "adapter_model.safetensors").unlink(), INVALID, "has no adapter_model.safetensors"),
        (
            lambda folder: (folder / "adapter_model.safetensors").rename(folder / "adapter_model.bin"),
            INVALID,
            "pickled weights \\(adapter_model.bin\\)",
        ),
        (lambda folder: (folder / "adapter_model.safetensors").write_bytes(b"x" * 90), INVALID, "download the adapter"),
        (
            lambda folder: (folder / "adapter_model.safetensors").write_bytes(
                (folder / "adapter_model.safetensors").read_bytes()[:-10]
            ),
            INVALID,
            "truncated",
        ),
        (tensors(lambda found: found.clear()), INVALID, "no tensors"),
        (tensors(lambda found: found.pop(name_of(Q, "B"))), INVALID, "has no lora_B"),
        (tensors(lambda found: found.update({name_of(Q, "B"): torch.zeros(32, 3)})), INVALID, "do not fit together"),
        (tensors(lambda found: found.update({name_of(Q, "A"): torch.zeros(4)})), INVALID, "do not fit together"),
        (tensors(lambda found: found[name_of(Q, "A")].fill_(torch.nan)), INVALID, "NaN"),
        (tensors(lambda found: found.update({name_of(Q, "A"): torch.zeros(4, 16).long()})), INVALID, "int64"),
        (tensors(lambda found: found.update({"x.lora_magnitude_vector": torch.ones(2)})), INVALID, "DoRA"),
        (tensors(lambda found: found.update({"x.lora_embedding_A": torch.ones(2)})), INVALID, "embeddings"),
        (tensors(lambda found: found.update({"base_model.model.norm.weight": torch.ones(2)})), INVALID, "not a matrix"),
        (renamed("self_attn.q_proj", "embed_tokens"), INVALID, "part of embeddings"),
        (renamed("model.layers.0.self_attn.q_proj", "lm_head"), INVALID, "the LM head"),
        (renamed("mlp.down_proj", "mlp.experts.1.down_proj"), INVALID, "experts of a mixture"),
        (renamed("layers.0.self_attn.q_proj", "layers.7.self_attn.q_proj"), WRONG_BASE, "no module model.layers.7"),
        (renamed("q_proj", "c_attn"), WRONG_BASE, "its linear layers are down_proj, q_proj"),
        (
            tensors(lambda found: found.update({name_of(Q, "B"): torch.zeros(64, 4)})),
            WRONG_BASE,
            "16 inputs and 32 outputs in this model, and 16 and 64 in the adapter, which is for the base model base",
        ),
        (lambda folder: make_adapter(folder, SHAPES, rank=32), RANK, "has rank 32, and --max-lora-rank is 16"),
    ],
)
def test_a_folder_that_cannot_be_served_is_named(
    tmp_path: Path, damage: Callable[[Path], object], reason: AdapterFailure, words: str
) -> None:
    damage(make_adapter(tmp_path, SHAPES))
    with pytest.raises(AdapterError, match=words) as error:
        read(tmp_path)
    assert error.value.reason is reason


def test_values_beyond_the_models_type_are_refused(tmp_path: Path) -> None:
    make_adapter(tmp_path, SHAPES)
    tensors(lambda found: found[name_of(Q, "B")].fill_(60_000.0))(tmp_path)
    read(tmp_path)
    with pytest.raises(AdapterError, match="too large for torch.float16"):
        read(tmp_path, dtype=torch.float16)
