"""The execution of the model on batches: inputs, KV cache, attention, sampling. ``load_model`` prepares a model.

torch is loaded with the first model, not when this package is imported.
"""

import gc
import time

from quire_engine.config import EngineConfig
from quire_engine.core.ports import LoadedModel


def load_model(config: EngineConfig) -> LoadedModel:
    """Load the model and its KV cache, compile the kernels, and produce one token before returning.

    Raise ModelFolderError or FlagsError if the folder or the options are not supported.
    """
    began = time.perf_counter()
    # Hundreds of modules stay alive: the collector would visit them repeatedly during the import.
    gc.disable()
    try:
        from quire_engine.runner.startup import load
    finally:
        gc.freeze()
        gc.enable()
    return load(config, import_seconds=time.perf_counter() - began)


__all__ = ["load_model"]
