"""Conversion of a model's tokenizer to tokenizer.json, by a subprocess that may import transformers.

The result is cached under a hash of its source files, outside the model folder, which may be read-only.
"""

import hashlib
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from quire_engine.errors import ModelFolderError

_SOURCES = (
    "tokenizer.model",
    "spiece.model",
    "sentencepiece.bpe.model",
    "vocab.json",
    "merges.txt",
    "vocab.txt",
    "tiktoken.model",
)
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
        _convert(folder, target, converter)
    return target


def _convert(folder: Path, target: Path, converter: Sequence[str]) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent) as scratch:
        result = Path(scratch, "tokenizer.json")
        command = [*converter, str(folder), str(result)]
        environment = {**os.environ, "HF_HUB_OFFLINE": "1"}
        try:
            done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=_TIMEOUT_SECONDS)
        except subprocess.TimeoutExpired:
            raise ModelFolderError(
                f"converting the tokenizer of {folder} took more than {_TIMEOUT_SECONDS:g} s"
            ) from None
        if done.returncode != 0 or not result.is_file():
            lines = done.stderr.strip().splitlines() or [f"exit code {done.returncode}"]
            raise ModelFolderError(f"the tokenizer of {folder} cannot be converted to tokenizer.json: {lines[-1]}")
        result.replace(target)


def _digest(folder: Path) -> str:
    digest = hashlib.sha256()
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
