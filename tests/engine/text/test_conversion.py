"""Folders with only a SentencePiece model or a tekken.json: the ids are those of their own libraries."""

import json
from pathlib import Path
from typing import Any

import pytest
from sentencepiece_file import sentencepiece_file

from quire_engine.errors import ModelFolderError
from quire_engine.text.tokenizer import Tokenizer, load_tokenizer

KNOWN: list[dict[str, Any]] = json.loads(Path(__file__).with_name("known_tokens.json").read_text())
"""Texts, and their ids in each vocabulary (tools/known_tokens.py)."""


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def folder_with(tmp_path: Path, name: str, data: bytes, **settings: object) -> Path:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / name).write_bytes(data)
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder


def differences(tokenizer: Tokenizer, vocabulary: str) -> list[tuple[str, list[int], list[int]]]:
    found = [(known["text"], tokenizer.encode(known["text"], add_special_tokens=False), known) for known in KNOWN]
    return [(text, ids, known[vocabulary]) for text, ids, known in found if ids != known[vocabulary]]


@pytest.mark.parametrize("file", ["tokenizer.model.v1", "mistral_instruct_tokenizer_240323.model.v3"])
def test_sentencepiece_ids_equal_those_of_its_library(mistral_files: Path, tmp_path: Path, file: str) -> None:
    data = (mistral_files / file).read_bytes()
    tokenizer = load_tokenizer(folder_with(tmp_path, "tokenizer.model", data))
    assert differences(tokenizer, file) == []
    assert tokenizer.pieces is not None, "decoded from the bytes of its tokens"
    assert [tokenizer.decode(tokenizer.encode(text, add_special_tokens=True)) for text in ("<s>", "é🤗")] == [
        "<s><s>",
        "<s> é🤗",
    ]


@pytest.mark.slow
def test_tekken_ids_equal_those_of_its_library(mistral_files: Path, tmp_path: Path) -> None:
    file = "tekken_240911.json"
    folder = folder_with(tmp_path, "tekken.json", (mistral_files / file).read_bytes(), add_bos_token=True)
    tokenizer = load_tokenizer(folder)
    assert differences(tokenizer, file) == []
    assert tokenizer.encode("[INST]hi", add_special_tokens=True)[:2] == [1, 3]
    assert tokenizer.vocab_size == 131072


def test_tokenizer_config_decides_on_bos_and_eos(mistral_files: Path, tmp_path: Path) -> None:
    data = (mistral_files / "tokenizer.model.v1").read_bytes()
    added = {"32000": {"content": "<|im_end|>", "special": True}, "2": {"content": "</s>", "special": True}}
    folder = folder_with(
        tmp_path,
        "tokenizer.model",
        data,
        add_bos_token=False,
        add_eos_token=True,
        legacy=False,
        added_tokens_decoder=added,
    )
    tokenizer = load_tokenizer(folder)
    ids = tokenizer.encode("hi<|im_end|>hi", add_special_tokens=True)
    assert (ids[0] != 1, ids[-1], ids.count(32000)) == (True, 2, 1)
    assert tokenizer.decode(ids) == "hi<|im_end|>hi</s>", "no space behind the special token"
    assert 32000 in tokenizer.special_ids


PIECES = [("<unk>", 0.0, 2), ("<s>", 0.0, 3), ("</s>", 0.0, 3), ("▁", -1.0, 1), ("a", -2.0, 1), ("▁a", -0.5, 1)]


def test_extra_spaces_are_removed_if_the_model_requires_it(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(folder_with(tmp_path, "tokenizer.model", sentencepiece_file(PIECES, (3, 2))))
    assert tokenizer.encode("  a   a ", add_special_tokens=False) == [5, 5]


@pytest.mark.parametrize(
    ("name", "data", "settings", "part"),
    [
        ("tokenizer.model", sentencepiece_file(PIECES, (3, 1)), {}, "of kind unigram"),
        ("tokenizer.model", sentencepiece_file(PIECES), {}, "of kind unigram"),
        ("tokenizer.model", b"IQ== 0\nIg== 1\n", {}, "is a tiktoken file"),
        ("tiktoken.model", b"IQ== 0\nIg== 1\n", {}, "is a tiktoken file"),
        ("tokenizer.model", b"not a model", {}, "is not a SentencePiece model"),
        ("tokenizer.model", b"", {}, "is not a SentencePiece model"),
        ("tokenizer.model", sentencepiece_file(PIECES, (3, 2))[:-9], {}, "is not a SentencePiece model"),
        (
            "tokenizer.model",
            sentencepiece_file([*PIECES, ("▁▁", 0.0, 4)], (3, 2)),
            {},
            "user-defined pieces contain spaces",
        ),
        (
            "tokenizer.model",
            sentencepiece_file(PIECES, (3, 2)),
            {"added_tokens_decoder": {"9": {"content": "<x>"}}},
            "'<x>' has the id 9",
        ),
        ("tekken.json", b"{}", {}, "is not a tekken.json"),
        (
            "tekken.json",
            b'{"config": {"default_num_special_tokens": 3, "default_vocab_size": 5, "pattern": "."}, "vocab": []}',
            {},
            "ranks are not those from 0 to 1",
        ),
        *(
            (
                "tekken.json",
                b'{"config": {"default_num_special_tokens": 3, "default_vocab_size": 4, "pattern": "%s"},'
                b' "vocab": [{"rank": 0, "token_bytes": "YQ=="}]}' % pattern,
                {},
                "its pattern is not a regular expression",
            )
            for pattern in (b"(", rb"\ud83d")
        ),
    ],
)
def test_unconvertible_tokenizers_are_refused_with_a_reason(
    tmp_path: Path, name: str, data: bytes, settings: dict[str, Any], part: str
) -> None:
    with pytest.raises(ModelFolderError, match=name) as caught:
        load_tokenizer(folder_with(tmp_path, name, data, **settings))
    assert part in str(caught.value)
