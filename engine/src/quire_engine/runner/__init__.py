"""Runs a model over batches: inputs, KV cache, attention, sampling. ``load_model`` makes one ready.

torch is loaded when a model is, not when this package is imported.
"""

import gc
import time

from quire_engine.config import EngineConfig
from quire_engine.core.ports import LoadedModel


def load_model(config: EngineConfig) -> LoadedModel:
    """Loads the model and its KV cache, compiles what needs compiling, and produces one token before returning.

    Raises ModelFolderError or FlagsError where the folder or the options cannot be served.
    """
    began = time.perf_counter()
    # Hundreds of modules stay: the collector would look through them again and again while they are loaded.
    gc.disable()
    try:
        from quire_engine.runner.startup import load
    finally:
        gc.freeze()
        gc.enable()
    return load(config, import_seconds=time.perf_counter() - began)


__all__ = ["load_model"]
