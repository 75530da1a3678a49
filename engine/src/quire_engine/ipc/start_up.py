"""The start-up line of an engine process: one line of JSON on its standard input, which then stays open.

The line comes from the API process alone: no flag and no variable reaches ``RunnerFactory``. When the input ends, the
API process is gone, and the engine process ends too.
"""

import msgspec

from quire_engine import config_json
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
    return config_json.encode(start_up) + b"\n"


def decode(line: bytes) -> StartUp:
    return config_json.decode(line, StartUp)
