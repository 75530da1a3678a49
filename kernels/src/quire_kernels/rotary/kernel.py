"""rotary in Triton: one program per token and group of heads.

(x[i], x[i + R/2]) becomes (x[i] cos - x[i + R/2] sin, x[i + R/2] cos + x[i] sin), in float32 (RoFormer, arXiv
2104.09864).

Legend: T tokens, H heads, D head dim, P positions in the table, R rotated components.
"""

import triton
import triton.language as tl
from torch import Tensor

from quire_kernels.triton_runtime.config import config_for
from quire_kernels.triton_runtime.debug import kernel
from quire_kernels.triton_runtime.device import require_device, target_of
from quire_kernels.triton_runtime.launch import Launch, cdiv, launches, next_power_of_2
from quire_kernels.triton_runtime.target import Target


@triton.jit
def load_angles(cos_sin, position, HALF: tl.constexpr, HALF_BLOCK: tl.constexpr):
    """Return the cosines and sines of a position, [1, HALF_BLOCK] each; its padding (ones and zeros) has no effect."""
    component = tl.arange(0, HALF_BLOCK)[None, :]
    row = cos_sin + position * (2 * HALF)
    cos = tl.load(row + component, mask=component < HALF, other=1.0)
    sin = tl.load(row + HALF + component, mask=component < HALF, other=0.0)
    return cos, sin


@kernel(varying=["num_positions"])
def _rotary_kernel(
    x,  # [T, H, D]
    cos_sin,  # [P, R]
    positions,  # [T]
    token_stride,
    num_positions,
    H: tl.constexpr,
    D: tl.constexpr,
    HALF: tl.constexpr,
    HALF_BLOCK: tl.constexpr,
    HEADS: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    position = tl.load(positions + token)
    tl.device_assert((position >= 0) & (position < num_positions), "rotary: positions leave the table")
    cos, sin = load_angles(cos_sin, position, HALF, HALF_BLOCK)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)[:, None]  # [HEADS, 1]
    component = tl.arange(0, HALF_BLOCK)[None, :]
    inside = (head < H) & (component < HALF)
    place = x + token * token_stride + head * D + component
    first = tl.load(place, mask=inside, other=0.0)
    second = tl.load(place + HALF, mask=inside, other=0.0).to(tl.float32)
    turned = first.to(tl.float32) * cos - second * sin
    tl.store(place + HALF, (second * cos + first.to(tl.float32) * sin).to(first.dtype), mask=inside)
    tl.store(place, turned.to(first.dtype), mask=inside)


def rotary(x: Tensor, cos_sin: Tensor, positions: Tensor) -> None:
    require_device("rotary", x.device)
    tokens, heads, dim = x.shape
    half = cos_sin.shape[1] // 2
    if not tokens or not half:
        return
    launch = _launch(heads, dim, half, target_of(x.device))
    grid = (tokens, cdiv(heads, launch.constants["HEADS"]))
    launch(grid, x, cos_sin, positions, x.stride(0), cos_sin.shape[0])


@launches
def _launch(heads: int, dim: int, half: int, target: Target) -> Launch:
    options = config_for("rotary.rotary", target, f"block={next_power_of_2(dim)}").options
    options["HEADS"] = min(options["HEADS"], next_power_of_2(heads))
    return Launch(_rotary_kernel, H=heads, D=dim, HALF=half, HALF_BLOCK=next_power_of_2(half), **options)
