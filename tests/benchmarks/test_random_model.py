"""The random checkpoint: a tokenizer with distinct visible text for each id, and tensors that fit the config."""

import dataclasses
import json
from pathlib import Path

import pytest
from safetensors import safe_open
from tokenizers import Tokenizer

from benchmarks.models.random_model import SMOLLM2_135M, LlamaShape, ensure_model, tensor_shapes, tokenizer

TINY = LlamaShape(hidden=64, layers=2, heads=4, kv_heads=2, intermediate=96, vocabulary=1_000, max_positions=128)


@pytest.mark.parametrize("vocabulary", [97, 98, 1_000, 49_152])
def test_every_token_is_visible_text_of_its_own(vocabulary: int) -> None:
    made = Tokenizer.from_str(json.dumps(tokenizer(vocabulary)))
    texts = [made.decode([number]) for number in range(1, vocabulary)]
    assert made.get_vocab_size() == vocabulary
    assert len(set(texts)) == vocabulary - 1
    assert [text for text in texts if not text.isprintable() and text != "\n"] == []
    assert "" not in texts


def test_text_survives_encoding() -> None:
    made = Tokenizer.from_str(json.dumps(tokenizer(49_152)))
    text = "The quick brown fox,\n jumps over 13 lazy dogs {and} more"
    assert made.decode(made.encode(text).ids) == text
    assert made.encode("abcd").tokens == ["abcd"]


@pytest.mark.parametrize("tied", [True, False])
def test_parameter_count_equals_that_of_the_tensors(tied: bool) -> None:
    shape = dataclasses.replace(SMOLLM2_135M, tied_embeddings=tied)
    sizes = tensor_shapes(shape).values()
    assert shape.parameters == sum(size[0] * (size[1] if len(size) == 2 else 1) for size in sizes)


def test_checkpoint_is_created_once_per_request_for_another(tmp_path: Path) -> None:
    folder = ensure_model(tmp_path / "model", TINY)
    weights = folder / "model.safetensors"
    with safe_open(weights, framework="pt") as file:
        assert {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()} == tensor_shapes(TINY)  # noqa: SIM118
    written, first = weights.stat().st_mtime_ns, weights.read_bytes()
    ensure_model(folder, TINY)
    assert weights.stat().st_mtime_ns == written
    ensure_model(folder, TINY, seed=1)
    assert weights.read_bytes() != first


def test_folder_with_other_files_is_not_overwritten(tmp_path: Path) -> None:
    (tmp_path / "thesis.txt").write_text("mine")
    with pytest.raises(ValueError, match=r"holds thesis\.txt already"):
        ensure_model(tmp_path, TINY)
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.txt"]
