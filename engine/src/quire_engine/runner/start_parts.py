"""The intermediate results of a start-up: a model with its weights, and a warm runner for it."""

from dataclasses import dataclass

import torch

from quire_engine.core.kv_layout import KVCacheLayout
from quire_engine.core.ports import Runner
from quire_engine.model.candidate import BuiltModel
from quire_engine.model.shape import ModelShape
from quire_engine.runner.adapter_store import RunnerAdapters
from quire_engine.runner.cache_size import CacheDemand, CacheSize
from quire_engine.runner.draft_start import Draft, with_draft_layers
from quire_engine.runner.start_report import MemoryUse
from quire_engine.runner.warm_up import Measured


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelInMemory:
    built: BuiltModel
    shape: ModelShape
    dtype: torch.dtype
    cache_dtype: torch.dtype
    device: torch.device
    demand: CacheDemand
    adapters: RunnerAdapters | None = None
    reserved_bytes: int = 0
    """Host memory that is left to adapters which are not loaded yet."""
    draft: Draft | None = None

    @property
    def cached_shape(self) -> ModelShape:
        """The shape of the KV cache, which includes the draft model's layers."""
        return self.shape if self.draft is None else with_draft_layers(self.shape, self.draft.shape)

    @property
    def weight_bytes(self) -> int:
        """The bytes of the weights of all models."""
        return self.built.weight_bytes + (0 if self.draft is None else self.draft.weight_bytes)


@dataclass(frozen=True, slots=True, kw_only=True)
class WarmRunner:
    runner: Runner
    asynchronous: bool
    layout: KVCacheLayout
    size: CacheSize
    measured: Measured
    memory: MemoryUse
    sharing: str = ""
    """The numbers of tokens from which steps are shared among threads, as text; empty if that does not apply."""
    cache_seconds: float
    """The seconds to size and allocate the KV cache."""
    warm_up_seconds: float
