"""Checkpoints: found, checked and read, and all kinds of invalid ones."""

import json
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from quire_parity.shapes import config
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from quire_engine.errors import ModelFolderError
from quire_engine.model import weights
from quire_engine.model.candidate import BuildOptions
from quire_engine.model.config import ModelConfig
from quire_engine.model.decoder import Family, find_family, has_own_lm_head
from quire_engine.model.divided import Links, OneRank
from quire_engine.model.expert_tensors import read_stacked
from quire_engine.model.experts import ExpertNames, ExpertsConfig
from quire_engine.model.linear import TorchLinearBackend
from quire_engine.model.loader import find_native_candidate
from quire_engine.model.model_part import ModelPart
from quire_engine.model.rope import RopeConfig
from quire_engine.model.weights import RandomWeights, TensorReader, check_tensors, in_own_memory, open_checkpoint
from quire_engine.model_folder import WHOLE_FILE

LLAMA = find_family("LlamaForCausalLM")
CONFIG = config(
    vocab_size=30,
    hidden_size=16,
    intermediate_size=24,
    num_heads=2,
    num_kv_heads=1,
    head_dim=8,
    max_position_embeddings=64,
    eos_token_ids=(),
)
DOWN = "model.layers.1.mlp.down_proj.weight"


def tensors(config: ModelConfig = CONFIG) -> dict[str, Tensor]:
    return {name: torch.randn(shape) for name, shape in LLAMA.tensor_shapes(config, ()).items()}


def check(folder: Path, config: ModelConfig = CONFIG) -> None:
    """Check a folder as loading does before and during the read."""
    source = open_checkpoint(folder)
    for name in check_tensors(LLAMA, config, source.shapes(), "the checkpoint"):
        source.read(name)


def save_sharded(folder: Path, content: dict[str, Tensor]) -> None:
    names = sorted(content)
    shards = {"model-00001-of-00002.safetensors": names[::2], "model-00002-of-00002.safetensors": names[1::2]}
    for file, chosen in shards.items():
        save_file({name: content[name] for name in chosen}, folder / file)
    index = {"weight_map": {name: file for file, chosen in shards.items() for name in chosen}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


@pytest.mark.parametrize(
    "save", [lambda folder, content: save_file(content, folder / "model.safetensors"), save_sharded]
)
def test_single_and_sharded_checkpoints_are_read_equally(
    tmp_path: Path, save: Callable[[Path, dict[str, Tensor]], None]
) -> None:
    content = tensors()
    save(tmp_path, content)
    check(tmp_path)
    source = open_checkpoint(tmp_path)
    assert all(torch.equal(source.read(name), tensor) for name, tensor in content.items())


def test_files_without_an_index_are_a_checkpoint_together(tmp_path: Path) -> None:
    content = tensors()
    save_sharded(tmp_path, content)
    (tmp_path / "model.safetensors.index.json").unlink()
    check(tmp_path)
    source = open_checkpoint(tmp_path)
    assert source.shapes().keys() == content.keys()
    assert all(torch.equal(source.read(name), tensor) for name, tensor in content.items())


def test_files_without_an_index_that_share_a_tensor_are_refused(tmp_path: Path) -> None:
    save_file({DOWN: torch.zeros(1), "a": torch.zeros(1)}, tmp_path / "one.safetensors")
    save_file({DOWN: torch.zeros(1), "b": torch.zeros(1)}, tmp_path / "two.safetensors")
    with pytest.raises(ModelFolderError, match=f"tensor {DOWN} is in two.safetensors and in one.safetensors"):
        open_checkpoint(tmp_path)


def changed_in_the_last_row(embedding: Tensor) -> Tensor:
    head = embedding.clone()
    head[-1, -1] += 1.0
    return head


@pytest.mark.parametrize(
    ("head", "is_own"),
    [
        (lambda embedding: embedding.clone(), False),
        (lambda embedding: embedding.to(torch.float16), False),
        (changed_in_the_last_row, True),
        (lambda embedding: embedding[:-1].clone(), True),
    ],
)
def test_only_an_lm_head_that_is_no_copy_is_the_models_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, head: Callable[[Tensor], Tensor], is_own: bool
) -> None:
    monkeypatch.setattr(weights, "_COMPARED_ROWS", 7)
    embedding = torch.randn(30, 16).to(torch.float16).float()
    save_file({"model.embed_tokens.weight": embedding, "lm_head.weight": head(embedding)}, tmp_path / WHOLE_FILE)
    assert has_own_lm_head(open_checkpoint(tmp_path), torch.float16) is is_own


def test_model_safetensors_is_preferred_to_other_files(tmp_path: Path) -> None:
    content = tensors()
    save_file(content, tmp_path / "model.safetensors")
    (tmp_path / "consolidated.safetensors").write_bytes(b"other names of the same weights")
    assert torch.equal(open_checkpoint(tmp_path).read(DOWN), content[DOWN])


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (CONFIG, set()),
        (replace(CONFIG, tie_word_embeddings=False), {"lm_head.weight"}),
        (
            replace(CONFIG, num_layers=1, attention_bias=True),
            {f"model.layers.0.self_attn.{name}_proj.bias" for name in "qkvo"},
        ),
        (
            replace(CONFIG, num_layers=1, mlp_bias=True),
            {f"model.layers.0.mlp.{name}_proj.bias" for name in ("gate", "up", "down")},
        ),
    ],
)
def test_config_decides_which_tensors_are_expected(config: ModelConfig, expected: set[str]) -> None:
    plain = LLAMA.tensor_shapes(replace(CONFIG, num_layers=config.num_layers), ())
    assert set(LLAMA.tensor_shapes(config, ())) - set(plain) == expected


MOE = replace(
    CONFIG,
    num_layers=1,
    ropes=(RopeConfig(theta=1e4),),
    windows=(None,),
    experts=ExpertsConfig(
        num_experts=3, experts_per_token=2, intermediate_size=12, normalise_weights=True, in_layer=(True,)
    ),
)
FUSED = {"model.layers.0.mlp.experts.gate_up_proj", "model.layers.0.mlp.experts.down_proj"}


@pytest.mark.parametrize(
    ("family", "names", "expected"),
    [
        (
            find_family("MixtralForCausalLM"),
            set(),
            {"block_sparse_moe.gate.weight": (3, 16)}
            | {f"block_sparse_moe.experts.{i}.{name}.weight": (12, 16) for i in range(3) for name in ("w1", "w3")}
            | {f"block_sparse_moe.experts.{i}.w2.weight": (16, 12) for i in range(3)},
        ),
        (
            find_family("MixtralForCausalLM"),
            {*FUSED, "model.layers.0.mlp.gate.weight"},
            {"mlp.gate.weight": (3, 16), "mlp.experts.gate_up_proj": (3, 24, 16), "mlp.experts.down_proj": (3, 16, 12)},
        ),
        (
            find_family("Qwen3MoeForCausalLM"),
            {"model.layers.0.mlp.experts.down_proj"},
            {"mlp.gate.weight": (3, 16), "mlp.experts.gate_up_proj": (3, 24, 16), "mlp.experts.down_proj": (3, 16, 12)},
        ),
        (
            find_family("Qwen3MoeForCausalLM"),
            set(),
            {"mlp.gate.weight": (3, 16)}
            | {f"mlp.experts.{i}.{name}_proj.weight": (12, 16) for i in range(3) for name in ("gate", "up")}
            | {f"mlp.experts.{i}.down_proj.weight": (16, 12) for i in range(3)},
        ),
    ],
)
def test_experts_are_read_in_the_layout_of_the_checkpoint(
    family: Family, names: set[str], expected: dict[str, tuple[int, ...]]
) -> None:
    found = family.tensor_shapes(MOE, names)
    sparse = {name: shape for name, shape in found.items() if "mlp" in name or "moe" in name}
    assert sparse == {f"model.layers.0.{name}": shape for name, shape in expected.items()}


def test_a_missing_expert_is_named() -> None:
    found = dict(find_family("MixtralForCausalLM").tensor_shapes(MOE, ()))
    del found["model.layers.0.block_sparse_moe.experts.1.w3.weight"]
    with pytest.raises(ModelFolderError, match="tensor model.layers.0.block_sparse_moe.experts.1.w3.weight is missing"):
        check_tensors(find_family("MixtralForCausalLM"), MOE, found, "the checkpoint")


def drop(content: dict[str, Tensor]) -> None:
    del content[DOWN]


def reshape(content: dict[str, Tensor]) -> None:
    content[DOWN] = torch.zeros(16, 23)


def add(content: dict[str, Tensor]) -> None:
    content["model.layers.2.extra"] = torch.zeros(3)


def spoil(value: float) -> Callable[[dict[str, Tensor]], None]:
    def change(content: dict[str, Tensor]) -> None:
        content[DOWN][3, 4] = value

    return change


def quantise(dtype: torch.dtype) -> Callable[[dict[str, Tensor]], None]:
    def change(content: dict[str, Tensor]) -> None:
        content[DOWN] = torch.zeros(16, 24).to(dtype)

    return change


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (drop, f"tensor {DOWN} is missing"),
        (reshape, rf"tensor {DOWN} has shape \[16, 23\]; config.json requires \[16, 24\]"),
        (add, "tensor model.layers.2.extra is unexpected for LlamaForCausalLM"),
        (spoil(float("nan")), f"tensor {DOWN} contains NaN or infinity; the checkpoint is damaged"),
        (spoil(float("-inf")), f"tensor {DOWN} contains NaN or infinity"),
        (quantise(torch.float8_e4m3fn), f"tensor {DOWN} is torch.float8_e4m3fn; torch.bfloat16, torch.float16"),
        (
            quantise(torch.int8),
            f"tensor {DOWN} is torch.int8; torch.bfloat16, torch.float16, torch.float32 are supported",
        ),
    ],
)
def test_a_bad_tensor_is_named(tmp_path: Path, change: Callable[[dict[str, Tensor]], None], message: str) -> None:
    content = tensors()
    change(content)
    save_file(content, tmp_path / "model.safetensors")
    with pytest.raises(ModelFolderError, match=message):
        check(tmp_path)


def test_many_bad_tensors_stay_on_one_screen(tmp_path: Path) -> None:
    save_file({"other": torch.zeros(1)}, tmp_path / "model.safetensors")
    with pytest.raises(ModelFolderError, match="and 11 more") as raised:
        check(tmp_path)
    assert str(raised.value).count("\n") == 11


def test_tied_and_computed_tensors_may_be_present(tmp_path: Path) -> None:
    content = {**tensors(), "lm_head.weight": torch.zeros(30, 16)}
    content["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.zeros(4)
    save_file(content, tmp_path / "model.safetensors")
    check(tmp_path)


def test_a_truncated_file_is_named_with_its_size(tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors"
    save_file(tensors(), file)
    content = file.read_bytes()
    for size in (0, 5, 100, len(content) - 1):
        file.write_bytes(content[:size])
        with pytest.raises(
            ModelFolderError, match=rf"model.safetensors \({size:,} bytes\) is not a whole safetensors file"
        ):
            open_checkpoint(tmp_path)


def test_pickle_weights_are_refused_with_a_remedy(tmp_path: Path) -> None:
    (tmp_path / "pytorch_model.bin").write_bytes(b"\x80")
    with pytest.raises(
        ModelFolderError, match=r"only pickle weights \(pytorch_model.bin\).*convert them to safetensors"
    ):
        open_checkpoint(tmp_path)


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({}, r"has no \*.safetensors file"),
        ({"model.safetensors.index.json": "{}"}, "is not an index of safetensors files: KeyError"),
        ({"model.safetensors.index.json": "nothing"}, "is not an index of safetensors files"),
        (
            {"model.safetensors.index.json": '{"weight_map": {"x": "absent.safetensors"}}'},
            "lacks absent.safetensors, which model.safetensors.index.json names; copy or download the rest",
        ),
        ({"model.safetensors.index.json": '{"weight_map": {}}'}, "weight_map is empty"),
        ({"model.safetensors.index.json": '{"weight_map": {"x": 5}}'}, "5 is not the name of a file next to it"),
        (
            {"model.safetensors.index.json": '{"weight_map": {"x": "../other/a.safetensors"}}'},
            "'../other/a.safetensors' is not the name of a file next to it",
        ),
        ({"model.safetensors.index.json": '{"weight_map": ["x"]}'}, "is not an index of safetensors files"),
    ],
)
def test_a_folder_without_a_checkpoint_is_refused(tmp_path: Path, files: dict[str, str], message: str) -> None:
    for name, content in files.items():
        (tmp_path / name).write_text(content)
    with pytest.raises(ModelFolderError, match=message):
        open_checkpoint(tmp_path)


def test_index_with_missing_tensors_is_refused(tmp_path: Path) -> None:
    content = tensors()
    save_sharded(tmp_path, content)
    shard = tmp_path / json.loads((tmp_path / "model.safetensors.index.json").read_text())["weight_map"][DOWN]
    with safe_open(shard, framework="pt") as opened:
        kept = {name: opened.get_tensor(name) for name in opened.keys() if name != DOWN}  # noqa: SIM118
    save_file(kept, shard)
    with pytest.raises(ModelFolderError, match=f"index.json names {DOWN} in {shard.name}, but no file holds that"):
        open_checkpoint(tmp_path)


def test_weights_beyond_float16_range_are_refused_in_float16(tmp_path: Path) -> None:
    content = {**tensors(), DOWN: torch.full((16, 24), -7e4, dtype=torch.bfloat16)}
    save_file(content, tmp_path / "model.safetensors")
    source = open_checkpoint(tmp_path)
    assert float(TensorReader(source, torch.bfloat16)(DOWN).min()) < -6e4
    with pytest.raises(
        ModelFolderError, match=f"{DOWN} has the value 70144, and float16 ends at 65504; use --dtype bfloat16"
    ):
        TensorReader(source, torch.float16)(DOWN)


def test_a_part_of_a_tensor_is_read_without_the_rest(tmp_path: Path) -> None:
    content = {**tensors(), "experts": torch.stack([torch.full((2, 3), float(i)) for i in range(4)])}
    content["experts"][3] = torch.nan
    save_file(content, tmp_path / "model.safetensors")
    source = open_checkpoint(tmp_path)
    assert torch.equal(source.read("experts", 2), torch.full((2, 3), 2.0))
    with pytest.raises(ModelFolderError, match="tensor experts contains NaN"):
        source.read("experts", 3)


needs_maps = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc/self/maps")


def mappings(file: Path) -> int:
    return Path("/proc/self/maps").read_text().count(str(file))


@needs_maps
def test_copied_tensors_keep_no_file_mapped(tmp_path: Path) -> None:
    save_file(tensors(), tmp_path / "model.safetensors")
    read = TensorReader(open_checkpoint(tmp_path), torch.float32)
    table, norm = in_own_memory(read("model.embed_tokens.weight")), read("model.norm.weight")
    assert mappings(tmp_path / "model.safetensors") == 1
    del read
    assert mappings(tmp_path / "model.safetensors") == 0
    assert torch.isfinite(table).all() and torch.isfinite(norm).all()


@needs_maps
def test_files_are_unmapped_during_loading(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("quire_engine.model.weights._MAPPED_BYTES", 1)
    content = tensors()
    save_sharded(tmp_path, content)
    read = TensorReader(open_checkpoint(tmp_path), torch.float32)
    for name, tensor in content.items():
        assert torch.equal(read(name), tensor)
        assert sum(mappings(file) for file in tmp_path.glob("*.safetensors")) <= 1


def test_a_tensor_in_two_files_is_refused(tmp_path: Path) -> None:
    save_sharded(tmp_path, tensors())
    save_file({DOWN: torch.zeros(1)}, tmp_path / "model-00001-of-00002.safetensors")
    save_file({DOWN: torch.zeros(1)}, tmp_path / "model-00002-of-00002.safetensors")
    with pytest.raises(ModelFolderError, match=f"{DOWN} is in model-00002-of-00002.safetensors and in model-00001"):
        open_checkpoint(tmp_path)


def test_dummy_weights_are_the_same_for_the_same_seed() -> None:
    shapes = LLAMA.tensor_shapes(replace(CONFIG, attention_bias=True), ())
    first, second, other = (RandomWeights(shapes, seed=seed, device=torch.device("cpu")) for seed in (5, 5, 6))
    backwards = {name: second.read(name) for name in reversed(shapes)}
    assert all(torch.equal(first.read(name), backwards[name]) for name in shapes)
    assert not torch.equal(first.read(DOWN), other.read(DOWN))
    assert not torch.equal(first.read(DOWN), first.read(DOWN.replace("layers.1", "layers.0")))
    assert float(first.read("model.norm.weight").min()) == 1.0
    assert float(first.read("model.layers.0.self_attn.q_proj.bias").abs().max()) == 0.0


@pytest.mark.parametrize("tied", [False, True])
def test_dummy_weights_of_a_stage_are_those_of_the_model(tied: bool, tmp_path: Path) -> None:
    config = {
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": 30,
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "max_position_embeddings": 64,
        "tie_word_embeddings": tied,
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    options = BuildOptions(load_format="dummy", seed=3, dtype=torch.float32, backend=TorchLinearBackend(torch.float32))
    candidate = find_native_candidate(tmp_path)
    whole: Any = candidate.build(options).model
    part = ModelPart(stage=1, stages=2)
    links = Links(part=part, tensor=OneRank())
    stage: Any = candidate.divided(part).build(replace(options, links=links)).model
    layer = whole.layers[1]
    pairs = [
        (stage.layers[0].attention.qkv, layer.attention.qkv),
        (stage.layers[0].attention.out, layer.attention.out),
        (stage.layers[0].mlp.down, layer.mlp.down),
        (stage.head.lm_head, whole.lm_head),
    ]
    assert all(torch.equal(own.keywords["weight"], other.keywords["weight"]) for own, other in pairs)


class ReadOf:
    """A checkpoint with the given tensors."""

    def __init__(self, content: dict[str, Tensor]) -> None:
        self.names = content.keys()
        self._content = content

    def __call__(self, name: str, part: int | None = None) -> Tensor:
        return self._content[name] if part is None else self._content[name][part]


def test_experts_are_stacked_equally_from_every_layout() -> None:
    gate_up, down = torch.randn(3, 24, 16), torch.randn(3, 16, 12)
    together = {
        "model.layers.0.mlp.experts.gate_up_proj": gate_up,
        "model.layers.0.mlp.experts.down_proj": down,
    }
    apart = {}
    for expert in range(3):
        prefix = f"model.layers.0.block_sparse_moe.experts.{expert}"
        apart[f"{prefix}.w1.weight"], apart[f"{prefix}.w3.weight"] = gate_up[expert].chunk(2)
        apart[f"{prefix}.w2.weight"] = down[expert]
    names = ExpertNames(part="block_sparse_moe", gate="w1", up="w3", down="w2")
    for content in (together, apart):
        found = read_stacked(names, "model.layers.0", 3, ReadOf(content))
        assert torch.equal(found[0], gate_up) and torch.equal(found[1], down)
        assert all(tensor.is_contiguous() for tensor in found)
