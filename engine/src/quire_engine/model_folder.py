"""A quick check of a model folder before anything slow: its configuration and its weight files.

It reads a few kilobytes in milliseconds: config.json and the headers of the safetensors files. The engine process
checks the tensors themselves; this finds the common mistakes: a wrong path, an incomplete download, pickled weights.
"""

import json
import struct
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from quire_engine.config_overrides import is_by_kind, rotation_field, with_overrides
from quire_engine.errors import ModelFolderError

WHOLE_FILE = "model.safetensors"
"""The file of a checkpoint without an index; other safetensors files in the folder are not part of it."""
INDEX = "model.safetensors.index.json"
"""The file that names the file of each tensor, if a checkpoint has several."""
_MAX_HEADER_BYTES = 100_000_000


@dataclass(frozen=True, slots=True, kw_only=True)
class ConfigOverrides:
    """Values that replace those of a model folder's JSON files, objects within objects field by field."""

    config: Mapping[str, Any] = field(default_factory=dict)
    """Values of config.json (--hf-overrides)."""
    generation: Mapping[str, Any] = field(default_factory=dict)
    """Values of generation_config.json (--override-generation-config)."""


NO_OVERRIDES = ConfigOverrides()


def read_config(folder: Path, overrides: ConfigOverrides = NO_OVERRIDES) -> dict[str, Any]:
    """Return config.json with its overrides; {} where there is no file. Raises ModelFolderError."""
    content = read_json_object(folder / "config.json")
    return with_overrides(content, overrides.config) if content else {}


def read_generation_config(folder: Path, overrides: ConfigOverrides = NO_OVERRIDES) -> dict[str, Any]:
    """Return generation_config.json with its overrides. Raises ModelFolderError."""
    return with_overrides(read_json_object(folder / "generation_config.json"), overrides.generation)


@dataclass(frozen=True, slots=True)
class ModelFolder:
    """The properties of a model that the server needs before the engine process has loaded it."""

    path: Path
    name: str
    """The name of the model for clients, unless a flag sets another."""
    vocab_size: int | None
    max_position_embeddings: int | None
    scaled_positions: bool
    """True if the model scales its positions, so that only the loader knows its maximum length."""


def inspect_model_folder(path: Path, *, weights: bool, overrides: ConfigOverrides = NO_OVERRIDES) -> ModelFolder:
    """Return the properties of a model folder, and check its weight files too with ``weights``.

    Raises ModelFolderError.
    """
    if not path.exists():
        hint = "; quire-engine serves local folders, `quire up` downloads hf:// models" if _looks_like_hub(path) else ""
        raise ModelFolderError(f"the folder {path} does not exist{hint}")
    if not path.is_dir():
        raise ModelFolderError(f"{path} is a file; --model expects the folder that contains config.json")
    config = _config(path, overrides)
    if weights:
        _check_weights(path)
    text = config.get("text_config") if isinstance(config.get("text_config"), dict) else config
    return ModelFolder(
        path=path,
        name=path.resolve().name,
        vocab_size=_whole_number(text, "vocab_size"),
        max_position_embeddings=_whole_number(text, "max_position_embeddings"),
        scaled_positions=_has_scaled_positions(text),
    )


def pinned(path: Path) -> Path:
    """Resolve a symbolic link, because it may point to another version before this one is read again."""
    return path.resolve() if path.is_symlink() else path


def check_model_len(folder: ModelFolder, max_model_len: int | None) -> None:
    """Raise ModelFolderError for a maximum length above the positions of the model."""
    positions = folder.max_position_embeddings
    if max_model_len is None or positions is None or folder.scaled_positions:
        return
    if max_model_len > positions:
        raise ModelFolderError(
            f"--max-model-len {max_model_len} exceeds the {positions} positions of this model "
            f"(max_position_embeddings in {folder.path / 'config.json'}); --hf-overrides can give it YaRN, or more "
            "positions than it was trained with"
        )


def _has_scaled_positions(config: Any) -> bool:
    rope = config.get(rotation_field(config))
    ropes = rope.values() if is_by_kind(rope) else [rope]
    types = (one.get("rope_type") or one.get("type") for one in ropes if isinstance(one, dict))
    return any(kind not in (None, "default") for kind in types)


def _looks_like_hub(path: Path) -> bool:
    return not path.is_absolute() and len(path.parts) == 2 and path.parts[0] not in (".", "..")


def _config(path: Path, overrides: ConfigOverrides) -> dict[str, Any]:
    file = path / "config.json"
    if not file.is_file():
        raise ModelFolderError(f"{path} contains no config.json: it is not a model folder in Hugging Face layout")
    config = read_config(path, overrides)
    if not isinstance(config.get("model_type"), str):
        raise ModelFolderError(f"{file} has no model_type")
    return config


def _whole_number(config: Any, name: str) -> int | None:
    value = config.get(name)
    return value if type(value) is int and value > 0 else None


def _check_weights(path: Path) -> None:
    index = path / INDEX
    files = sorted(path.glob("*.safetensors"))
    if not index.is_file() and path / WHOLE_FILE in files:
        files = [path / WHOLE_FILE]
    if index.is_file():
        named = _indexed_files(index)
        files = sorted(path / name for name in named)
        missing = sorted(name for name in named if not (path / name).is_file())
        if missing:
            others = f" and {len(missing) - 1} more files" if len(missing) > 1 else ""
            raise ModelFolderError(f"{index} lists {missing[0]}{others}, which do not exist")
    if not files:
        pickled = next((file.name for pattern in ("*.bin", "*.pt", "*.pth") for file in path.glob(pattern)), None)
        if pickled:
            raise ModelFolderError(
                f"{path} contains pickled weights ({pickled}), which can run code when loaded; "
                "save the model as safetensors"
            )
        raise ModelFolderError(f"{path} contains no *.safetensors (--load-format dummy runs without weights)")
    for file in files:
        check_safetensors(file)


def _indexed_files(index: Path) -> set[str]:
    try:
        names = json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()
        return {str(name) for name in names}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ModelFolderError(f"{index} is not a valid index of weights: {error!r}") from error


def check_safetensors(file: Path) -> None:
    """Check the header and the length of a safetensors file. Raises ModelFolderError.

    The format is 8 bytes of header length, the header as JSON, then exactly the bytes that the header describes; see
    https://huggingface.co/docs/safetensors.
    """
    size = file.stat().st_size
    with file.open("rb") as stream:
        head = stream.read(8)
        length = struct.unpack("<Q", head)[0] if len(head) == 8 else 0
        if not 2 <= length <= min(size - 8, _MAX_HEADER_BYTES):
            raise ModelFolderError(f"{file} is not a safetensors file, or is truncated ({size} bytes)")
        raw = stream.read(length)
    try:
        header = json.loads(raw)
        end = max((entry["data_offsets"][1] for name, entry in header.items() if name != "__metadata__"), default=0)
    except (ValueError, KeyError, TypeError, IndexError, AttributeError):
        raise ModelFolderError(f"{file} has an invalid header: the file is damaged") from None
    if size != 8 + length + end:
        raise ModelFolderError(
            f"{file} has {size} bytes, but its header describes {8 + length + end}: the file is truncated"
        )


def read_json_array(file: Path) -> list[Any]:
    """Return the JSON array in a file; [] where the file does not exist. Raises ModelFolderError."""
    content = _read_json(file, [])
    if not isinstance(content, list):
        raise ModelFolderError(f"{file} contains {type(content).__name__} instead of a JSON array")
    return content


def read_json_object(file: Path) -> dict[str, Any]:
    """Return the JSON object in a file; {} where the file does not exist. Raises ModelFolderError."""
    content = _read_json(file, {})
    if not isinstance(content, dict):
        raise ModelFolderError(f"{file} contains {type(content).__name__} instead of a JSON object")
    return content


def _read_json(file: Path, missing: Any) -> Any:
    try:
        return json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return missing
    except (OSError, ValueError) as error:
        raise ModelFolderError(f"{file} cannot be read as JSON: {error}") from error
