"""The start-up line of an engine process: one line of JSON on its standard input, which then stays open.

The line comes from the API process alone: no flag and no variable reaches ``RunnerFactory``. When the input ends, the
API process is gone, and the engine process ends too.
"""

from pathlib import Path
from typing import Any

import msgspec

from quire_engine.config import EngineConfig


class RunnerFactory(msgspec.Struct, frozen=True, kw_only=True):
    """The function that loads the model: ``module:function``, called with the EngineConfig and keywords ``options``."""

    function: str = "quire_engine.runner:load_model"
    options: dict[str, bool | int | float | str | list[int]] = {}


class StartUp(msgspec.Struct, frozen=True, kw_only=True):
    address: str
    """The address on which the API process listens, in ZeroMQ's format."""
    began: float
    """The start time of the process on the monotonic clock."""
    config: EngineConfig
    factory: RunnerFactory


def encode(start_up: StartUp) -> bytes:
    return msgspec.json.encode(start_up, enc_hook=_encode_path) + b"\n"


def decode(line: bytes) -> StartUp:
    return msgspec.json.decode(line, type=StartUp, dec_hook=_decode_path)


def _encode_path(value: Any) -> str:
    if isinstance(value, Path):
        return str(value)
    raise NotImplementedError(f"{type(value).__name__} in the configuration")


def _decode_path(kind: type, value: Any) -> Path:
    if kind is Path:
        return Path(value)
    raise NotImplementedError(f"{kind.__name__} in the configuration")
