"""Llama shapes of several sizes. A folder holds a config and a tokenizer, and the engine generates random weights.

Small shapes have small vocabularies, as small trained models do; otherwise the embeddings would be most of the model.
"""

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from benchmarks.models.random_model import SMOLLM2_135M, LlamaShape, write_description

SHAPES = {
    "5M": LlamaShape(hidden=256, layers=6, heads=8, kv_heads=4, intermediate=704, vocabulary=4096),
    "15M": LlamaShape(hidden=384, layers=8, heads=6, kv_heads=2, intermediate=1024, vocabulary=8192),
    "50M": LlamaShape(hidden=512, layers=14, heads=8, kv_heads=4, intermediate=1408, vocabulary=16384),
    "135M": SMOLLM2_135M,
    "300M": LlamaShape(hidden=896, layers=24, heads=14, kv_heads=2, intermediate=3328, vocabulary=49152),
    "500M": LlamaShape(hidden=1024, layers=32, heads=16, kv_heads=4, intermediate=3712, vocabulary=49152),
}


@contextmanager
def model_folder(shape: LlamaShape) -> Iterator[Path]:
    """Write a folder for ``--load-format dummy`` and remove it afterwards."""
    with tempfile.TemporaryDirectory(prefix="quire-shape-") as name:
        write_description(Path(name), shape)
        yield Path(name)
