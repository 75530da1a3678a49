"""The start of adapters: the slots of the model's linear layers, and the store in host memory."""

import logging
from dataclasses import dataclass, replace
from typing import cast

import torch

from quire_engine.config import AdapterOptions
from quire_engine.model.adapters.layout import module_shapes, slot_numbers
from quire_engine.model.adapters.slots import with_adapter_slots
from quire_engine.model.candidate import BuiltModel, Candidate
from quire_engine.model.config import ModelConfig
from quire_engine.model.decoder import joined_linears
from quire_engine.model.layers import DecoderStack
from quire_engine.runner.adapter_store import AdapterStore, RunnerAdapters

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class StartedAdapters:
    """A model with slots for adapters, and the bytes that its adapters may take in host memory."""

    built: BuiltModel
    adapters: RunnerAdapters | None = None
    host_bytes: int = 0


def adapter_problem(options: AdapterOptions, candidate: Candidate) -> str | None:
    """Return why the model cannot have adapters, or None."""
    if not options.enabled:
        return None
    if not candidate.is_native:
        return (
            f"--enable-lora is for quire's own model families, and this is {candidate.served_by}; merge the adapter"
            " into the model's weights"
        )
    return None


def start_adapters(
    options: AdapterOptions, candidate: Candidate, built: BuiltModel, dtype: torch.dtype, device: torch.device
) -> StartedAdapters:
    """Return the model with slots, if adapters are enabled."""
    if not options.enabled:
        return StartedAdapters(built=built)
    linears = joined_linears(cast("ModelConfig", candidate.shape))
    model, pool = with_adapter_slots(
        cast("DecoderStack", built.model),
        linears,
        slots=options.max_loras,
        max_rank=options.max_lora_rank,
        dtype=dtype,
        device=device,
    )
    pool.warm_up()
    store = AdapterStore(
        modules=module_shapes(linears),
        max_rank=options.max_lora_rank,
        dtype=dtype,
        capacity=options.max_cpu_loras,
        pinned=device.type == "cuda",
    )
    host_bytes = options.max_cpu_loras * slot_numbers(linears, options.max_lora_rank) * dtype.itemsize
    _log.info(
        "adapters: %d slots of rank %d, %.1f MB; up to %d adapters in host memory, at most %.1f MB",
        options.max_loras,
        options.max_lora_rank,
        pool.num_bytes / 1e6,
        options.max_cpu_loras,
        host_bytes / 1e6,
    )
    return StartedAdapters(
        built=replace(built, model=model), adapters=RunnerAdapters(pool, store), host_bytes=host_bytes
    )
