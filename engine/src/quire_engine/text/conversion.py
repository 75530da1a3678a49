"""Conversion of a model's tokenizer to tokenizer.json.

SentencePiece models and tekken.json are converted here, because transformers converts them to other token ids than
their own libraries give. The rest is converted by a subprocess that may import transformers.

The result is cached under a hash of its source files, outside the model folder, which may be read-only.
"""

import hashlib
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import AddedToken

from quire_engine.errors import ModelFolderError
from quire_engine.model_folder import read_json_object
from quire_engine.text.sentencepiece import Ends, NotConvertible, sentencepiece_tokenizer
from quire_engine.text.tekken import tekken_tokenizer

_SENTENCEPIECE = (
    "tokenizer.model",
    "tokenizer.model.v3",
    "tokenizer.model.v7",
    "spiece.model",
    "sentencepiece.bpe.model",
    "tiktoken.model",
)
_TEKKEN = "tekken.json"
_OTHERS = ("vocab.json", "merges.txt", "vocab.txt")
_SOURCES = (_TEKKEN, *_SENTENCEPIECE, *_OTHERS)
_VERSION = "2"
"""The version of the conversions: a file that an earlier version has cached is not used."""
_SETTINGS = ("tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "config.json")
_CONVERTER = (sys.executable, "-m", "quire_engine.model.convert_tokenizer")
_TIMEOUT_SECONDS = 300.0


def converted_tokenizer_file(folder: Path, converter: Sequence[str] = _CONVERTER) -> Path:
    """Return the cached conversion, or run ``converter FOLDER FILE`` first. Raises ModelFolderError."""
    if not any((folder / name).is_file() for name in _SOURCES):
        raise ModelFolderError(
            f"{folder} contains no tokenizer: expected tokenizer.json, or a file that can be converted to it "
            f"({', '.join(_SOURCES)})"
        )
    target = _cache_folder() / f"{_digest(folder)}.json"
    if not target.is_file():
        target.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=target.parent) as scratch:
            result = Path(scratch, "tokenizer.json")
            tokenizer = _own_conversion(folder)
            if tokenizer is None:
                _convert(folder, result, converter)
            else:
                tokenizer.save(str(result))
            result.replace(target)
    return target


def _own_conversion(folder: Path) -> tokenizers.Tokenizer | None:
    """Return the tokenizer of a SentencePiece model or a tekken.json; None where the folder has neither."""
    file = next((folder / name for name in (_TEKKEN, *_SENTENCEPIECE) if (folder / name).is_file()), None)
    if file is None:
        return None
    settings = read_json_object(folder / "tokenizer_config.json")
    ends = Ends(
        add_bos=settings.get("add_bos_token") is not False,
        add_eos=settings.get("add_eos_token") is True,
        prefix_segments=settings.get("legacy") is not False,
    )
    convert = tekken_tokenizer if file.name == _TEKKEN else sentencepiece_tokenizer
    try:
        tokenizer = convert(file.read_bytes(), ends)
        _add_tokens(tokenizer, folder, settings)
    except (NotConvertible, OSError) as error:
        raise ModelFolderError(f"the tokenizer {file} cannot be converted to tokenizer.json: {error}") from error
    return tokenizer


def _add_tokens(tokenizer: tokenizers.Tokenizer, folder: Path, settings: Mapping[str, Any]) -> None:
    """Add the tokens that a fine-tune has put behind the vocabulary."""
    added: dict[str, tuple[int, dict[str, Any]]] = {
        text: (token_id, {}) for text, token_id in read_json_object(folder / "added_tokens.json").items()
    }
    decoder = settings.get("added_tokens_decoder")
    if isinstance(decoder, dict):
        added |= {str(token.get("content")): (int(token_id), token) for token_id, token in decoder.items()}
    for text, (token_id, options) in sorted(added.items(), key=lambda item: item[1][0]):
        if tokenizer.token_to_id(text) is None:
            kept = {
                name: options[name] for name in ("lstrip", "rstrip", "single_word", "normalized") if name in options
            }
            token = AddedToken(text, **{"normalized": False, **kept}, special=options.get("special") is True)
            tokenizer.add_tokens([token])
        if tokenizer.token_to_id(text) != token_id:
            raise NotConvertible(f"the added token {text!r} has the id {token_id} instead of the next one")


def _convert(folder: Path, result: Path, converter: Sequence[str]) -> None:
    command = [*converter, str(folder), str(result)]
    environment = {**os.environ, "HF_HUB_OFFLINE": "1"}
    try:
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=_TIMEOUT_SECONDS)
    except subprocess.TimeoutExpired:
        raise ModelFolderError(f"converting the tokenizer of {folder} took more than {_TIMEOUT_SECONDS:g} s") from None
    if done.returncode != 0 or not result.is_file():
        lines = done.stderr.strip().splitlines() or [f"exit code {done.returncode}"]
        raise ModelFolderError(f"the tokenizer of {folder} cannot be converted to tokenizer.json: {lines[-1]}")


def _digest(folder: Path) -> str:
    digest = hashlib.sha256(_VERSION.encode())
    for name in sorted(_SOURCES + _SETTINGS):
        file = folder / name
        if file.is_file():
            digest.update(f"{name}\0{file.stat().st_size}\0".encode())
            digest.update(file.read_bytes())
    return digest.hexdigest()


def _cache_folder() -> Path:
    home = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    folder = home / "quire" / "tokenizers"
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError:  # a pod's root is read-only
        return Path(tempfile.gettempdir(), f"quire-tokenizers-{os.getuid()}")
    return folder if os.access(folder, os.W_OK) else Path(tempfile.gettempdir(), f"quire-tokenizers-{os.getuid()}")
