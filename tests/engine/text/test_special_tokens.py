import json
from pathlib import Path
from typing import Any

import pytest

from quire_engine.special_tokens import tokenizer_eos_token_id

NAMED = {"tokenizer_config.json": {"eos_token": {"content": "<end>"}}}
ADDED = {"added_tokens": [{"id": 9, "content": "<end>", "special": True}], "model": {"vocab": {"<end>": 1}}}


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({"tokenizer.json": ADDED}, None),
        ({**NAMED, "tokenizer.json": ADDED}, 9),
        ({**NAMED, "tokenizer.json": {"added_tokens": [], "model": {"vocab": {"<end>": 1}}}}, 1),
        ({**NAMED, "tokenizer.json": {"model": {"type": "Unigram", "vocab": [["<unk>", 0.0], ["<end>", -1.0]]}}}, 1),
        ({**NAMED, "tokenizer.json": {"model": {"vocab": {"a": 0}}}}, None),
        ({**NAMED, "vocab.json": {"<end>": 3}}, 3),
        ({**NAMED, "added_tokens.json": {"<end>": 4}, "vocab.json": {"<end>": 3}}, 4),
        ({"special_tokens_map.json": {"eos_token": "<end>"}, "vocab.json": {"<end>": 3}}, 3),
        (
            {"tokenizer_config.json": {"eos_token": "<end>", "added_tokens_decoder": {"7": {"content": "<end>"}}}},
            7,
        ),
    ],
)
def test_eos_id_of_the_tokenizer_is_found(tmp_path: Path, files: dict[str, Any], expected: int | None) -> None:
    for name, content in files.items():
        (tmp_path / name).write_text(json.dumps(content))
    assert tokenizer_eos_token_id(tmp_path) == expected
