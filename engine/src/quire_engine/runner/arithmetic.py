"""The choice of the floating-point type and the linear backend of a model.

On a CPU the choice is measured: the candidates compute the model's own layers at the first start on a machine, and the
times are stored. The choice is a function of the times. Every supported GPU multiplies both 16-bit types fast, so there
the checkpoint decides.
"""

import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch

from quire_common.model_memory import DTypeName, compute_dtype
from quire_engine import kept
from quire_engine.config import DType, EngineConfig, Quantization
from quire_engine.errors import EngineStartError
from quire_engine.model.linear import LinearBackend, candidates, choose_linear_backend
from quire_engine.model.linear.selection import ROWS, Times, cost, fastest, times_in_words
from quire_engine.model.linear.timing import SHARING_ROWS, LayerSizes, layer_sizes, time_ways, timed_sizes
from quire_engine.model.shape import ModelShape
from quire_engine.runner.attention_timing import time_attention
from quire_engine.runner.sharing import SharingTimes, are_plausible, time_sharing
from quire_kernels.packed_linear import supports_bfloat16

_log = logging.getLogger(__name__)
_BY_NAME = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
_KIND = "timings"

_CLOSE = 1.25
"""Attention is timed as well if two types are closer than this by their linear layers."""
_SLOW = 1.2
"""A requested type causes a warning if float32 is faster by this factor."""
_RUNTIME_BYTES = 1 << 30


@dataclass(frozen=True, slots=True, kw_only=True)
class Timings:
    """A file of the cache folder: the milliseconds that a layer takes on a machine."""

    facts: tuple[str, ...]
    linear: dict[str, tuple[float, ...]]
    """The milliseconds for each of ``ROWS``, by backend."""
    attention: dict[str, tuple[float, ...]] = field(default_factory=dict)
    """The milliseconds for each of ``ROWS``, by type; empty if they could not have changed the choice."""
    sharing: SharingTimes = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Arithmetic:
    """The arithmetic of a model."""

    dtype: torch.dtype
    backend: LinearBackend
    timings: Timings | None = None
    """None if nothing was timed because there was only one candidate."""

    @property
    def lines(self) -> list[str]:
        """The choice and the times on which it is based, for the start report."""
        if self.timings is None:
            return [f"{dtype_name(self.dtype)} by {self.backend.name}"]
        rows = f"{', '.join(map(str, ROWS[:-1]))} and {ROWS[-1]} rows"
        told = [
            f"{dtype_name(self.dtype)} by {self.backend.name}: the fastest over {rows} of a layer",
            *(times_in_words({name: taken}) for name, taken in self.timings.linear.items()),
        ]
        return told + [
            times_in_words({f"attention in {name}": taken}) for name, taken in self.timings.attention.items()
        ]


def choose_arithmetic(
    config: EngineConfig, shape: ModelShape, *, threads: int, available_bytes: int | None
) -> Arithmetic:
    """Return the fastest arithmetic for a model on this CPU, within what the options allow."""
    option, fast_bfloat16 = config.model.dtype, multiplies_bfloat16(config)
    if not _are_timed(config):
        dtype = likely_dtype(option, fast_bfloat16=fast_bfloat16)
        return Arithmetic(dtype=dtype, backend=untimed_backend(config, dtype))
    wide = float32_fits(
        shape,
        longest=config.model.max_model_len or shape.max_position_embeddings,
        kv_cache_bytes=config.cache.kv_cache_memory_bytes,
        available_bytes=available_bytes,
    )
    ways = ways_of(option, fast_bfloat16=fast_bfloat16, wide=wide)
    sizes = timed_sizes(layer_sizes(shape))
    timings = _timings(ways, sizes, shape, facts=_facts(config, option, sizes, shape, threads, ways), threads=threads)
    chosen = choose_way(ways, timings.linear, timings.attention, option)
    factor = slower_than_float32(ways, timings.linear, chosen)
    if option not in ("auto", "float32") and factor >= _SLOW:
        _log.warning("--dtype %s is %.1f times slower than float32 on this CPU: leave it out", option, factor)
    return Arithmetic(dtype=chosen.dtype, backend=chosen, timings=timings)


def same_arithmetic(config: EngineConfig, dtype: str, backend: str) -> Arithmetic:
    """Return the arithmetic that another process of the same engine has chosen, by the names of its parts.

    Raise EngineStartError if the CPU of this node does not have it.
    """
    if not _are_timed(config):
        return Arithmetic(dtype=_BY_NAME[dtype], backend=untimed_backend(config, _BY_NAME[dtype]))
    known = candidates(_BY_NAME[dtype], may_round=True)
    found = next((candidate for candidate in known if candidate.name == backend), None)
    if found is None:
        raise EngineStartError(
            f"rank 0 computes in {dtype} by {backend}, which this CPU does not have: set the same --dtype and"
            " --cpu-level on all nodes, to values that every CPU supports",
            2,
        )
    return Arithmetic(dtype=_BY_NAME[dtype], backend=found)


def _are_timed(config: EngineConfig) -> bool:
    """Return whether a CPU has several candidates, among which times decide."""
    return not config.device.deterministic and config.model.quantization != "int8"


def untimed_backend(config: EngineConfig, dtype: torch.dtype, device_type: str = "cpu") -> LinearBackend:
    """Return the backend that the options request, or the probably fastest one."""
    return choose_linear_backend(
        dtype,
        device_type,
        deterministic=config.device.deterministic,
        quantization=config.model.quantization,
    )


def ways_of(option: DType, *, fast_bfloat16: bool, wide: bool = True) -> tuple[LinearBackend, ...]:
    """Return the candidates to time, the probably fastest first.

    For a requested 16-bit type, float32 is included for comparison.

    wide  whether there is enough memory for 32-bit types if 16 bits would suffice
    """
    if option == "float32":
        return candidates(torch.float32)
    if option != "auto":
        return (*candidates(_BY_NAME[option]), candidates(torch.float32)[0])
    short = candidates(torch.bfloat16) if fast_bfloat16 else ()
    return (*short, *(candidates(torch.float32, may_round=True) if wide or not short else ()))


def choose_way(ways: Sequence[LinearBackend], linear: Times, attention: Times, option: DType) -> LinearBackend:
    """Return the fastest candidate, among those in the requested type."""
    allowed = [way for way in ways if option == "auto" or way.dtype == _BY_NAME[option]]
    whole = with_attention(allowed, linear, attention)
    chosen = fastest(whole)
    return next(way for way in allowed if way.name == chosen)


def with_attention(ways: Sequence[LinearBackend], linear: Times, attention: Times) -> dict[str, tuple[float, ...]]:
    """Return the time of a layer with its attention, if that was timed."""
    none = (0.0,) * len(ROWS)
    return {
        way.name: tuple(
            a + b for a, b in zip(linear[way.name], attention.get(dtype_name(way.dtype), none), strict=True)
        )
        for way in ways
    }


def close_types(ways: Sequence[LinearBackend], linear: Times) -> tuple[torch.dtype, ...]:
    """Return the types whose best candidates are so close that attention may decide; nothing if one is fastest."""
    best: dict[torch.dtype, float] = {}
    for way in ways:
        best[way.dtype] = min(best.get(way.dtype, cost(linear[way.name])), cost(linear[way.name]))
    least = min(best.values())
    near = tuple(dtype for dtype, taken in best.items() if taken < _CLOSE * least)
    return near if len(near) > 1 else ()


def slower_than_float32(ways: Sequence[LinearBackend], linear: Times, chosen: LinearBackend) -> float:
    """Return the factor by which the chosen candidate is slower than the best in float32; 1 if that was not timed."""
    wide = [cost(linear[way.name]) for way in ways if way.dtype == torch.float32]
    return cost(linear[chosen.name]) / min(wide) if wide else 1.0


def _timings(
    ways: Sequence[LinearBackend], sizes: LayerSizes, shape: ModelShape, *, facts: tuple[str, ...], threads: int
) -> Timings:
    """Return the times of an earlier start on this machine, or measure and store them."""
    found = kept.read(_KIND, facts, Timings)
    began = time.perf_counter()
    if found is None or not _are_whole(found, ways):
        linear = time_ways(ways, sizes)
        attention = {dtype_name(dtype): time_attention(shape, dtype) for dtype in close_types(ways, linear)}
        found = Timings(facts=facts, linear=dict(linear), attention=attention)
    elif threads == 1 or (found.sharing and are_plausible(found.sharing)):
        return found
    if threads > 1:
        fast = next(way for way in ways if way.name == fastest(found.linear))
        found = replace(found, sharing=time_sharing(fast, sizes, threads=threads))
    kept.write(_KIND, found)
    _log.info("timed the model's layers in %.1f s", time.perf_counter() - began)
    return found


def _are_whole(timings: Timings, ways: Sequence[LinearBackend]) -> bool:
    """Return whether a file has valid times of exactly these candidates."""
    rows = [*timings.linear.values(), *timings.attention.values()]
    sensible = all(len(taken) == len(ROWS) and all(0.0 < one < 1e9 for one in taken) for taken in rows)
    shared = all(
        len(pairs) == len(SHARING_ROWS) and all(min(pair) > 0.0 for pair in pairs) for pairs in timings.sharing.values()
    )
    return list(timings.linear) == [way.name for way in ways] and sensible and shared


def _facts(
    config: EngineConfig,
    option: DType,
    sizes: LayerSizes,
    shape: ModelShape,
    threads: int,
    ways: Sequence[LinearBackend],
) -> tuple[str, ...]:
    """Return everything that determines the times."""
    limits = () if config.cpu is None else sorted(config.cpu.environment.items())
    return (
        *kept.this_machine().facts,
        f"limits: {config.cpu and config.cpu.level} {limits}",
        f"ways: {option} {[way.name for way in ways]}",
        f"layer: {sizes}",
        f"heads: {shape.num_heads} {shape.num_kv_heads} {shape.head_dim}",
        f"threads: {threads}",
    )


def float32_fits(shape: ModelShape, *, longest: int, kv_cache_bytes: int | None, available_bytes: int | None) -> bool:
    """Return whether the memory that suffices for 16 bits also suffices for 32; False if it is unknown.

    longest         tokens of the longest sequence, of which the KV cache must hold one
    kv_cache_bytes  the size of the KV cache, if it is given
    """
    if available_bytes is None:
        return False
    weights = layer_sizes(shape).count * shape.num_layers + 2 * shape.vocab_size * shape.hidden_size
    per_token = sum(2 * heads.kv_heads * heads.head_dim for heads in shape.layer_heads)
    sequence = per_token * longest * torch.float32.itemsize
    if kv_cache_bytes is not None and kv_cache_bytes < sequence:
        return False
    cache = sequence if kv_cache_bytes is None else kv_cache_bytes
    return weights * torch.float32.itemsize + cache + _RUNTIME_BYTES <= available_bytes


def multiplies_bfloat16(config: EngineConfig) -> bool:
    """Return whether the hardware multiplies bfloat16; without it the emulation is hundreds of times slower."""
    if config.cpu is not None:
        return config.cpu.multiplies_bfloat16
    try:
        return supports_bfloat16()
    except ImportError:  # a machine with a GPU may have no numba
        return False


def likely_dtype(option: DType, *, fast_bfloat16: bool) -> torch.dtype:
    """Return the type if nothing is timed: ``auto`` is bfloat16 if the CPU multiplies it, else float32."""
    if option == "float16" or (option == "bfloat16" and not fast_bfloat16):
        _log.warning("this CPU has no fast %s arithmetic; expect --dtype float32 to be many times faster", option)
    return _BY_NAME[compute_dtype(option, None, device="cpu", cpu_multiplies_bfloat16=fast_bfloat16)]


def resolve_gpu_dtype(option: DType, stored: DTypeName | None, quantization: Quantization = "none") -> torch.dtype:
    """Return the type on a GPU, where the checkpoint decides."""
    return _BY_NAME[compute_dtype(option, stored, device="gpu", quantization=quantization)]


def dtype_of(name: str) -> torch.dtype:
    """Return the type that ``dtype_name`` names."""
    return _BY_NAME[name]


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
