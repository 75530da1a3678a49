"""The choice between the library and our own kernel for products of few rows, by their times on this GPU.

At the first start of a model on a kind of GPU, both multiply weights of its layers' sizes, as graphs, and the times are
kept for later starts. The kernel is used only if its results agree with the library's here.

Legend: T rows, K inputs, N outputs.
"""

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from quire_engine import __version__, kept
from quire_engine.config import EngineConfig
from quire_engine.model.linear import LinearBackend
from quire_engine.model.linear.skinny import TIMED_ROWS, ProductTimes, Size, SkinnyLinearBackend, rows_by_kernel
from quire_engine.model.linear.timing import layer_sizes
from quire_engine.model.shape import ModelShape
from quire_engine.runner.device.accelerator import Accelerator, make_accelerator
from quire_engine.runner.device.measuring import LARGEST_ERROR, largest_error, least_microseconds
from quire_kernels.skinny_linear import DTYPES, skinny_linear
from quire_kernels.triton_runtime.shipped import link_shipped_kernels

_log = logging.getLogger(__name__)
_KIND = "gpu-timings"
_READ_BYTES = 256 << 20
"""The weights of different layers that a timed graph reads at least: several times the L2 cache."""
_MOST_COPIES = 64

Product = Callable[[Tensor, Tensor], Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class SizeTimes:
    outputs: int
    inputs: int
    times: ProductTimes


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceTimings:
    """A file of the cache folder: the times of products on a GPU."""

    facts: tuple[str, ...]
    sizes: tuple[SizeTimes, ...]


def may_time_products(config: EngineConfig) -> bool:
    """Return whether few rows may have a product of their own: not if results must not depend on their number.

    fp8 weights have another product, and with several ranks each would choose for its own part.
    """
    return not config.device.deterministic and config.model.quantization == "none" and config.parallel.ranks == 1


def with_fast_few_rows(
    backend: LinearBackend, shape: ModelShape, device: torch.device
) -> tuple[LinearBackend, tuple[str, ...]]:
    """Return the backend with our kernel where it is faster on this GPU, and the times for the start report.

    ``backend`` keeps weights as they are. It is returned itself if the kernel is faster nowhere, or not made for its
    dtype. ``device`` is a GPU, or the CPU where Triton's interpreter or a stand-in runs.
    """
    if backend.dtype not in DTYPES:
        return backend, ()
    timings = _timings(make_accelerator(device), product_sizes(shape), backend.dtype)
    if device.type == "cuda":
        torch.cuda.empty_cache()  # the weights come next
    rows = {(one.outputs, one.inputs): rows_by_kernel(one.times) for one in timings.sizes}
    lines = tuple(times_in_words(one) for one in timings.sizes)
    if not any(any(chosen) for chosen in rows.values()):
        return backend, lines
    return SkinnyLinearBackend(backend, rows), lines


def product_sizes(shape: ModelShape) -> tuple[Size, ...]:
    """Return the sizes of a layer's products and of the LM head, each once."""
    return tuple(dict.fromkeys((*layer_sizes(shape).weights, (shape.vocab_size, shape.hidden_size))))


def times_in_words(one: SizeTimes) -> str:
    """Return, for example, ``64 x 32: quire's kernel for 1 row (µs of quire and torch by rows: 1: 3.1 and 4.0)``."""
    rows, times = rows_by_kernel(one.times), one.times
    if times.problem:
        return f"{one.outputs} x {one.inputs}: torch, because quire's kernel {times.problem}"
    counts = [count for count in TIMED_ROWS if rows[count]]
    chosen = f"quire's kernel for {', '.join(map(str, counts))} rows" if counts else "torch"
    measured = ", ".join(
        f"{count}: {skinny:.1f} and {library:.1f}"
        for count, skinny, library in zip(TIMED_ROWS, times.skinny, times.library, strict=True)
    )
    return f"{one.outputs} x {one.inputs}: {chosen} (µs of quire and torch by rows: {measured})"


def _timings(accelerator: Accelerator, sizes: Sequence[Size], dtype: torch.dtype) -> DeviceTimings:
    """Return the times of an earlier start on this kind of GPU, or measure and keep them."""
    facts = _facts(accelerator.device, sizes, dtype)
    found = kept.read(_KIND, facts, DeviceTimings)
    if found is not None and _are_whole(found, sizes):
        return found
    link_shipped_kernels()
    began = time.perf_counter()
    found = DeviceTimings(
        facts=facts,
        sizes=tuple(
            SizeTimes(outputs=outputs, inputs=inputs, times=time_products(accelerator, (outputs, inputs), dtype))
            for outputs, inputs in sizes
        ),
    )
    accelerator.close()
    if not any(one.times.problem for one in found.sizes):  # such as too little memory at this start
        kept.write(_KIND, found)
    _log.info("timed products of few rows in %.1f s", time.perf_counter() - began)
    return found


def _facts(device: torch.device, sizes: Sequence[Size], dtype: torch.dtype) -> tuple[str, ...]:
    """Return everything that determines the times."""
    import triton

    from quire_kernels.triton_runtime.config import config_for  # needs Triton
    from quire_kernels.triton_runtime.device import device_properties, target_of

    return (
        f"gpu: {device_properties(device)}",
        f"quire: {__version__}",
        f"torch: {torch.__version__} {torch.version.cuda or torch.version.hip}",
        f"triton: {triton.__version__}",
        f"launch: {config_for('skinny_linear.multiply', target_of(device)).options}",
        f"products: {dtype} {TIMED_ROWS} {list(sizes)}",
    )


def _are_whole(timings: DeviceTimings, sizes: Sequence[Size]) -> bool:
    """Return whether a file has valid times of exactly these sizes."""
    return [(one.outputs, one.inputs) for one in timings.sizes] == list(sizes) and all(
        len(taken) == len(TIMED_ROWS) and all(0.0 <= each < 1e9 for each in taken)
        for one in timings.sizes
        for taken in (one.times.library, one.times.skinny)
    )


@torch.inference_mode()
def time_products(accelerator: Accelerator, size: Size, dtype: torch.dtype) -> ProductTimes:
    """Return the times of both products for weights [N, K] of random numbers, or why the kernel is not used."""
    try:
        return _time_products(accelerator, size, dtype)
    # A compiler and a driver fail in many ways, and the library's product is always there.
    except Exception as failure:
        problem = f"failed: {' '.join(str(failure).split()) or type(failure).__name__}"
        _log.warning("products of %d x %d are torch's: quire's kernel %s", *size, problem)
        untimed = (0.0,) * len(TIMED_ROWS)
        return ProductTimes(library=untimed, skinny=untimed, problem=problem)


def _time_products(accelerator: Accelerator, size: Size, dtype: torch.dtype) -> ProductTimes:
    outputs, inputs = size
    copies = min(_MOST_COPIES, max(1, _READ_BYTES // (outputs * inputs * dtype.itemsize)))
    weights = torch.empty((copies, outputs, inputs), dtype=dtype, device=accelerator.device).uniform_(-0.05, 0.05)
    xs = [torch.empty((rows, inputs), dtype=dtype, device=accelerator.device).uniform_(-1, 1) for rows in TIMED_ROWS]
    error = max(largest_error(skinny_linear(x, weights[0]), functional.linear(x, weights[0])) for x in xs)
    if not error <= LARGEST_ERROR:  # NaN is not
        raise ArithmeticError(f"its results differ from torch's by {error:.2g}")
    return ProductTimes(
        library=tuple(_time(accelerator, functional.linear, x, weights) for x in xs),
        skinny=tuple(_time(accelerator, skinny_linear, x, weights) for x in xs),
    )


def _time(accelerator: Accelerator, multiply: Product, x: Tensor, weights: Tensor) -> float:
    """Return the least microseconds of one product, in a graph that reads all weights."""

    def work() -> None:
        for weight in weights:
            multiply(x, weight)

    return least_microseconds(accelerator, work) / len(weights)
