import json
import sys
from pathlib import Path

import pytest
import tokenizers
from tokenizers import decoders, models

from quire_engine.errors import ModelFolderError
from quire_engine.text.conversion import converted_tokenizer_file
from quire_engine.text.token_pieces import token_pieces
from quire_engine.text.tokenizer import Tokenizer, load_tokenizer


def test_special_tokens_are_added_only_if_requested(byte_level: Tokenizer) -> None:
    ids = byte_level.encode("hi<|eos|>", add_special_tokens=False)
    assert byte_level.decode(ids) == "hi<|eos|>"
    assert byte_level.decode(ids, skip_special_tokens=True) == "hi"
    assert ids[-1] in byte_level.special_ids


def test_truncation_and_padding_of_the_file_do_not_apply(model_folder: Path) -> None:
    backend = tokenizers.Tokenizer.from_file(str(model_folder / "tokenizer.json"))
    backend.enable_truncation(2)
    backend.enable_padding(length=8)
    backend.save(str(model_folder / "tokenizer.json"))
    assert len(load_tokenizer(model_folder).encode("abcd", add_special_tokens=False)) == 4


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({}, {}),
        ({"tokenizer_config.json": {"bos_token": "<a>", "eos_token": None, "pad_token": 3}}, {"bos_token": "<a>"}),
        ({"tokenizer_config.json": {"bos_token": {"content": "<a>", "lstrip": False}}}, {"bos_token": "<a>"}),
        (
            {
                "tokenizer_config.json": {"bos_token": "<a>"},
                "special_tokens_map.json": {"bos_token": "<z>", "eos_token": "<b>"},
            },
            {"bos_token": "<a>", "eos_token": "<b>"},
        ),
    ],
)
def test_special_tokens_for_templates_are_read(
    model_folder: Path, files: dict[str, dict[str, object]], expected: dict[str, str]
) -> None:
    for name, content in files.items():
        (model_folder / name).write_text(json.dumps(content))
    assert load_tokenizer(model_folder).named_tokens == expected


@pytest.mark.parametrize(
    ("files", "part"),
    [
        ({}, r"contains no tokenizer: expected tokenizer\.json"),
        ({"tokenizer.json": "{"}, r"tokenizer\.json is not a valid tokenizer"),
        ({"tokenizer.json": '{"model": {}}'}, r"tokenizer\.json is not a valid tokenizer"),
    ],
)
def test_a_folder_without_a_usable_tokenizer_is_an_error(tmp_path: Path, files: dict[str, str], part: str) -> None:
    for name, content in files.items():
        (tmp_path / name).write_text(content)
    with pytest.raises(ModelFolderError, match=part):
        load_tokenizer(tmp_path)


@pytest.mark.slow
def test_a_folder_of_the_old_kind_is_converted_once(
    byte_level: Tokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    folder = tmp_path / "model"
    folder.mkdir()
    byte_level._backend.model.save(str(folder))  # vocab.json and merges.txt
    (folder / "tokenizer_config.json").write_text('{"tokenizer_class": "GPT2Tokenizer"}')
    (folder / "config.json").write_text('{"model_type": "gpt2"}')

    made = load_tokenizer(folder)
    text = "hello world é"
    assert made.decode(made.encode(text, add_special_tokens=False)) == text
    (cached,) = (tmp_path / "cache" / "quire" / "tokenizers").glob("*.json")
    written = cached.stat().st_mtime_ns
    load_tokenizer(folder)
    assert cached.stat().st_mtime_ns == written


@pytest.mark.parametrize(
    ("program", "part"),
    [
        (
            "import sys; sys.exit('ImportError: no tiktoken here')",
            "converted to tokenizer.json: ImportError: no tiktoken here",
        ),
        ("pass", "exit code 0"),
    ],
)
def test_failed_tokenizer_conversion_has_a_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, program: str, part: str
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (tmp_path / "vocab.txt").write_text("no vocabulary")
    with pytest.raises(ModelFolderError, match=part):
        converted_tokenizer_file(tmp_path, converter=(sys.executable, "-c", program))


@pytest.mark.parametrize(
    ("decoder", "adds_up"),
    [
        (decoders.ByteLevel(), True),
        (decoders.Sequence([decoders.ByteLevel()]), True),
        (decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]), True),
        (decoders.Sequence([decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]), True),
        (decoders.Sequence([decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 1)]), False),
        (decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace()]), False),
        (decoders.BPEDecoder(), False),
        (decoders.WordPiece(), False),
        (decoders.Metaspace(), False),
        (None, False),
    ],
)
def test_additive_byte_decoders_are_recognized(decoder: decoders.Decoder | None, adds_up: bool) -> None:
    backend = tokenizers.Tokenizer(models.BPE())
    assert (token_pieces(backend, decoder, {}) is not None) == adds_up


def test_a_token_of_half_a_character_is_bytes(byte_level: Tokenizer) -> None:
    ids = byte_level.encode("ñ", add_special_tokens=False)
    assert b"".join(byte_level.token_bytes(token_id) for token_id in ids) == "ñ".encode()
    assert len(ids) == 2
