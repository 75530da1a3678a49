"""The special tokens that a model folder names, and their ids, from its JSON files. No tokenizer is loaded.

The API process gives the names to chat templates; the engine process needs the id of the token that ends an answer.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from quire_engine.errors import ModelFolderError
from quire_engine.model_folder import read_json_object

_NAMES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


def named_special_tokens(folder: Path) -> dict[str, str]:
    """Return the special tokens by name, from tokenizer_config.json, else from special_tokens_map.json."""
    named: dict[str, str] = {}
    for file in ("tokenizer_config.json", "special_tokens_map.json"):
        content = read_json_object(folder / file)
        for name in _NAMES:
            value = content.get(name)
            text = value.get("content") if isinstance(value, dict) else value
            if isinstance(text, str):
                named.setdefault(name, text)
    return named


def tokenizer_eos_token_id(folder: Path) -> int | None:
    """Return the id of the tokenizer's own end-of-sequence token; None where the folder does not tell."""
    text = named_special_tokens(folder).get("eos_token")
    if text is None:
        return None
    return next((ids[text] for ids in _vocabularies(folder) if text in ids), None)


def _vocabularies(folder: Path) -> Iterator[dict[str, int]]:
    """Yield token ids by text, small files first: a tokenizer.json has megabytes, and is read only if it is needed."""
    added = read_json_object(folder / "tokenizer_config.json").get("added_tokens_decoder")
    if isinstance(added, dict):
        yield {
            token["content"]: int(token_id)
            for token_id, token in added.items()
            if isinstance(token, dict) and isinstance(token.get("content"), str) and token_id.isdecimal()
        }
    try:
        content = read_json_object(folder / "tokenizer.json")
    except ModelFolderError:
        content = {}  # the API process refuses a damaged file
    listed, model = content.get("added_tokens"), content.get("model")
    if isinstance(listed, list):
        yield _integers({token.get("content"): token.get("id") for token in listed if isinstance(token, dict)})
    yield _integers(model.get("vocab") if isinstance(model, dict) else None)
    yield _integers(read_json_object(folder / "added_tokens.json"))
    yield _integers(read_json_object(folder / "vocab.json"))


def _integers(vocabulary: Any) -> dict[str, int]:
    if isinstance(vocabulary, list):  # a unigram model lists tokens and scores in the order of their ids
        return {entry[0]: index for index, entry in enumerate(vocabulary) if isinstance(entry, list) and entry}
    if not isinstance(vocabulary, dict):
        return {}
    return {text: token_id for text, token_id in vocabulary.items() if type(token_id) is int}
