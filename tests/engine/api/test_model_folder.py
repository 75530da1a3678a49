import json
import os
import struct
from pathlib import Path

import pytest

from quire_engine.errors import ModelFolderError
from quire_engine.model_folder import (
    ConfigOverrides,
    check_model_len,
    inspect_model_folder,
    pinned,
    read_config,
)

CONFIG = {"model_type": "llama", "vocab_size": 100, "max_position_embeddings": 64}


def safetensors(data: int = 8, cut: int = 0) -> bytes:
    header = json.dumps({"w": {"dtype": "F32", "shape": [data // 4], "data_offsets": [0, data]}}).encode()
    content = struct.pack("<Q", len(header)) + header + bytes(data)
    return content[: len(content) - cut]


def folder(root: Path, **files: bytes | str | dict[str, object]) -> Path:
    for name, content in {"config.json": CONFIG, "model.safetensors": safetensors(), **files}.items():
        if isinstance(content, dict):
            content = json.dumps(content)
        if content:
            (root / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    return root


def test_complete_folder_passes(tmp_path: Path) -> None:
    found = inspect_model_folder(folder(tmp_path), weights=True)
    assert (found.vocab_size, found.max_position_embeddings, found.name) == (100, 64, tmp_path.name)


def test_sizes_in_a_nested_text_config_are_found(tmp_path: Path) -> None:
    config = {"model_type": "gemma3", "text_config": {"vocab_size": 7}}
    assert inspect_model_folder(folder(tmp_path, **{"config.json": config}), weights=True).vocab_size == 7


def test_a_benchmark_of_a_shape_needs_no_weights(tmp_path: Path) -> None:
    found = inspect_model_folder(folder(tmp_path, **{"model.safetensors": ""}), weights=False)
    assert found.vocab_size == 100


@pytest.mark.parametrize(
    ("files", "part"),
    [
        ({"config.json": ""}, "no config.json"),
        ({"config.json": "{"}, "cannot be read as JSON"),
        ({"config.json": "[]"}, "contains list instead of"),
        ({"config.json": "{}"}, "no model_type"),
        ({"model.safetensors": ""}, "no *.safetensors"),
        ({"model.safetensors": "", "pytorch_model.bin": "x"}, "pickled weights (pytorch_model.bin)"),
        ({"model.safetensors": safetensors(cut=3)}, "truncated"),
        ({"model.safetensors": safetensors(cut=40)}, "truncated"),
        ({"model.safetensors": b"\0" * 4}, "not a safetensors file"),
        ({"model.safetensors": struct.pack("<Q", 2**60) + b"{}"}, "not a safetensors file"),
        ({"model.safetensors": struct.pack("<Q", 5) + b"nojso"}, "the file is damaged"),
        ({"model.safetensors": struct.pack("<Q", 8) + b'{"w": 1}'}, "the file is damaged"),
        ({"model.safetensors": b"version https://git-lfs.github.com/spec/v1"}, "not a safetensors file"),
        ({"model.safetensors.index.json": "{}"}, "index.json is not a valid index"),
        ({"model.safetensors.index.json": {"weight_map": {"w": "model-2.safetensors"}}}, "model-2.safetensors"),
    ],
)
def test_unservable_folder_is_refused_with_the_reason(tmp_path: Path, files: dict[str, bytes | str], part: str) -> None:
    with pytest.raises(ModelFolderError) as caught:
        inspect_model_folder(folder(tmp_path, **files), weights=True)
    assert part in str(caught.value) and str(tmp_path) in str(caught.value)


@pytest.mark.parametrize(
    ("path", "part"), [("/none/here", "/none/here does not exist"), ("meta/llama", "`quire up` downloads")]
)
def test_missing_path_is_an_error(path: str, part: str) -> None:
    with pytest.raises(ModelFolderError, match=part):
        inspect_model_folder(Path(path), weights=True)


def test_file_instead_of_folder_is_an_error(tmp_path: Path) -> None:
    file = folder(tmp_path) / "config.json"
    with pytest.raises(ModelFolderError, match="is a file"):
        inspect_model_folder(file, weights=True)


@pytest.mark.skipif(not hasattr(os, "getuid"), reason="symbolic links")
def test_linked_folder_has_the_name_of_its_target(tmp_path: Path) -> None:
    real = tmp_path / "real-name"
    real.mkdir()
    folder(real)
    (tmp_path / "link").symlink_to(real)
    assert inspect_model_folder(tmp_path / "link", weights=True).name == "real-name"


def test_model_safetensors_is_preferred_to_other_files(tmp_path: Path) -> None:
    others = {"adapter.safetensors": b"damaged", "consolidated.safetensors": safetensors(cut=3)}
    assert inspect_model_folder(folder(tmp_path, **others), weights=True).vocab_size == 100


def test_overrides_replace_values_of_the_config(tmp_path: Path) -> None:
    config = {**CONFIG, "rope_scaling": {"factor": 2.0, "rope_type": "default"}}
    overrides = ConfigOverrides(config={"vocab_size": 7, "rope_scaling": {"rope_type": "yarn"}})
    found = inspect_model_folder(folder(tmp_path, **{"config.json": config}), weights=True, overrides=overrides)
    assert (found.vocab_size, found.scaled_positions) == (7, True)
    assert read_config(tmp_path, overrides)["rope_scaling"] == {"factor": 2.0, "rope_type": "yarn"}


@pytest.mark.parametrize(
    ("config", "asked", "fits"),
    [
        ({}, None, True),
        ({}, 64, True),
        ({}, 65, False),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}}, 65, False),
        ({"rope_scaling": {"type": "linear", "factor": 2.0}}, 65, True),
        ({"rope_parameters": {"rope_type": "yarn", "factor": 2.0}}, 65, True),
        ({"rope_parameters": {"full_attention": {"rope_type": "yarn", "factor": 2.0}}}, 65, True),
        ({"rope_parameters": {"full_attention": {"rope_type": "default"}, "sliding_attention": None}}, 65, False),
        ({"rope_parameters": {"rope_type": "yarn"}, "rope_scaling": {"rope_type": "default"}}, 65, False),
        ({"max_position_embeddings": None}, 65, True),
    ],
)
def test_more_positions_than_the_model_has_are_refused(
    tmp_path: Path, config: dict[str, object], asked: int | None, fits: bool
) -> None:
    found = inspect_model_folder(folder(tmp_path, **{"config.json": {**CONFIG, **config}}), weights=True)
    if fits:
        check_model_len(found, asked)
        return
    with pytest.raises(ModelFolderError, match="65 exceeds the 64 positions"):
        check_model_len(found, asked)


def test_a_linked_folder_is_resolved_at_the_start(tmp_path: Path) -> None:
    (tmp_path / "v1").mkdir()
    (tmp_path / "v2").mkdir()
    latest = tmp_path / "latest"
    latest.symlink_to("v1")
    served = pinned(latest)
    latest.unlink()
    latest.symlink_to("v2")
    assert served == tmp_path / "v1"
    assert pinned(tmp_path / "v1") == tmp_path / "v1"


def test_a_path_is_quoted_as_it_was_written(tmp_path: Path) -> None:
    missing = Path("no/such/../folder")
    assert pinned(missing) == missing
