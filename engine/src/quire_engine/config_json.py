"""The JSON form of values that contain an ``EngineConfig``, for the processes that one engine starts."""

from pathlib import Path
from typing import Any, TypeVar

import msgspec

Value = TypeVar("Value")


def encode(value: Any) -> bytes:
    """Return ``value``, a msgspec structure, as one line of JSON without its end."""
    return msgspec.json.encode(value, enc_hook=_encode_path)


def decode(line: bytes, kind: type[Value]) -> Value:
    return msgspec.json.decode(line, type=kind, dec_hook=_decode_path)


def _encode_path(value: Any) -> str:
    if isinstance(value, Path):
        return str(value)
    raise NotImplementedError(f"{type(value).__name__} in the configuration")


def _decode_path(kind: type, value: Any) -> Path:
    if kind is Path:
        return Path(value)
    raise NotImplementedError(f"{kind.__name__} in the configuration")
