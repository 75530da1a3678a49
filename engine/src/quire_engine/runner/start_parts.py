"""What the parts of a start-up hand on: a model whose weights are there, and a runner over it that is warm."""

from dataclasses import dataclass

import torch

from quire_engine.core.kv_layout import KVCacheLayout
from quire_engine.core.ports import Runner
from quire_engine.model.candidate import BuiltModel
from quire_engine.model.shape import ModelShape
from quire_engine.runner.cache_size import CacheDemand, CacheSize
from quire_engine.runner.warm_up import Measured


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelInMemory:
    built: BuiltModel
    shape: ModelShape
    dtype: torch.dtype
    cache_dtype: torch.dtype
    device: torch.device
    demand: CacheDemand


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryUse:
    """Bytes; None where that is not known."""

    activations: int | None = None
    graphs: int | None = None
    graph_sizes: tuple[int, ...] = ()
    before: int | None = None
    free: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class WarmRunner:
    runner: Runner
    asynchronous: bool
    layout: KVCacheLayout
    size: CacheSize
    measured: Measured
    memory: MemoryUse
    sharing: str = ""
    """From how many tokens on steps are shared among threads, in words; empty where that does not apply."""
    cache_seconds: float
    """Finding the size of the KV cache, and making it."""
    warm_up_seconds: float
