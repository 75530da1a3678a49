"""Real vocabularies give the ids that llama.cpp lists for 47 texts, and any cutting of ids gives the same text.

The vocabularies, texts and ids come from the source distribution of llama-cpp-python (llama.cpp, MIT license,
models/ggml-vocab-*.gguf with .inp and .out).
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import package_sources
import pytest
import tokenizers
from gguf import GGUFReader
from hypothesis import given
from hypothesis import strategies as st
from sentencepiece_file import sentencepiece_file
from tokenizers import AddedToken, Regex, decoders, models, pre_tokenizers

from quire_engine.text.detokenizer import Detokenizer
from quire_engine.text.tokenizer import Tokenizer, load_tokenizer

_CONTROL = 3
_CASE_INSENSITIVE_ENDINGS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_WORDS = r"|[^\r\n\p{L}\p{N}]?\p{L}+"
_REST = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
WORDS = {
    "llama-bpe": _CASE_INSENSITIVE_ENDINGS + _WORDS + r"|\p{N}{1,3}" + _REST,
    "qwen2": _CASE_INSENSITIVE_ENDINGS + _WORDS + r"|\p{N}" + _REST,
}
"""The pattern with which each vocabulary of bytes cuts a text into words."""
BYTES_OF_BPE = 2


@pytest.fixture(scope="module")
def vocabularies() -> Path:
    folder = package_sources.source("llama-cpp-source.lock", "vendor/llama.cpp/models/")
    return folder / "vendor/llama.cpp/models"


def known_answers(folder: Path, name: str) -> list[tuple[str, list[int]]]:
    texts = (folder / f"ggml-vocab-{name}.gguf.inp").read_text(encoding="utf-8").split("\n__ggml_vocab_test__\n")
    lines = (folder / f"ggml-vocab-{name}.gguf.out").read_text(encoding="utf-8").split("\n")
    return [(text, [int(number) for number in line.split()]) for text, line in zip(texts, lines, strict=False)]


def byte_level_file(reader: GGUFReader, words: str) -> tokenizers.Tokenizer:
    """Return the tokenizer of a vocabulary of bytes, as its tokenizer.json describes it."""
    tokens, kinds, merges = (_content(reader, name) for name in ("tokens", "token_type", "merges"))
    pairs = [tuple(merge.split(" ")) for merge in merges]
    vocabulary = {token: index for index, token in enumerate(tokens)}
    backend = tokenizers.Tokenizer(models.BPE(vocab=vocabulary, merges=pairs, ignore_merges=True))
    backend.decoder = decoders.ByteLevel()
    cut = pre_tokenizers.Split(Regex(words), behavior="isolated")
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [cut, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    backend.add_special_tokens(
        [AddedToken(token, normalized=False) for token, kind in zip(tokens, kinds, strict=True) if kind == _CONTROL]
    )
    return backend


def _content(reader: GGUFReader, name: str) -> Any:
    return reader.fields[f"tokenizer.ggml.{name}"].contents()


def differences(tokenizer: Tokenizer, known: Sequence[tuple[str, list[int]]]) -> list[tuple[str, list[int], list[int]]]:
    found = [(text, tokenizer.encode(text, add_special_tokens=False), ids) for text, ids in known]
    return [each for each in found if each[1] != each[2]]


@pytest.fixture(scope="module", params=WORDS)
def byte_level_vocabulary(request: pytest.FixtureRequest, vocabularies: Path, tmp_path_factory: Any) -> Any:
    """Return a vocabulary of bytes, loaded from a model folder, and its known answers."""
    folder = tmp_path_factory.mktemp(request.param)
    reader = GGUFReader(vocabularies / f"ggml-vocab-{request.param}.gguf")
    byte_level_file(reader, WORDS[request.param]).save(str(folder / "tokenizer.json"))
    return load_tokenizer(folder), known_answers(vocabularies, request.param)


@pytest.mark.slow
def test_vocabularies_of_bytes_give_known_ids(byte_level_vocabulary: Any) -> None:
    tokenizer, known = byte_level_vocabulary
    assert differences(tokenizer, known) == []
    assert len(known) >= 40 and tokenizer.pieces is not None


@pytest.mark.slow
@given(data=st.data())
def test_any_chunking_of_real_ids_gives_the_text(byte_level_vocabulary: Any, data: st.DataObject) -> None:
    tokenizer, known = byte_level_vocabulary
    text, ids = data.draw(st.sampled_from(known))
    cuts = sorted(data.draw(st.lists(st.integers(0, len(ids)), max_size=12)))
    detokenizer = Detokenizer(tokenizer)
    borders = [0, *cuts, len(ids)]
    parts = [detokenizer.feed(ids[start:end]).text for start, end in zip(borders, borders[1:], strict=False)]
    assert "".join(parts) + detokenizer.flush() == text
    assert not any("\ufffd" in part for part in parts)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["llama-spm", "phi-3"])
def test_converted_sentencepiece_vocabularies_give_known_ids(vocabularies: Path, tmp_path: Path, name: str) -> None:
    """Convert the vocabulary from a tokenizer.model, the file in which such models come."""
    reader = GGUFReader(vocabularies / f"ggml-vocab-{name}.gguf")
    tokens, scores, kinds = (_content(reader, each) for each in ("tokens", "scores", "token_type"))
    training = ((3, BYTES_OF_BPE), (35, 1))
    normalizer = ((3, 1), (4, 0), (5, 1))
    pieces = list(zip(tokens, map(float, scores), map(int, kinds), strict=True))
    (tmp_path / "tokenizer.model").write_bytes(sentencepiece_file(pieces, *training, normalizer=normalizer))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"legacy": True}))
    tokenizer = load_tokenizer(tmp_path)
    known = known_answers(vocabularies, name)
    assert differences(tokenizer, known) == []
    assert len(known) >= 40
