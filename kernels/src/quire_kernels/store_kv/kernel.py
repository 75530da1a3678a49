"""store_kv in Triton: one program per token and group of heads; query heads come before key and value heads.

The rotation and the norm of a head, which is that of ``rms_norm``, are in float32, with the norm's result rounded to
its dtype as in ``rms_norm``. A float8 cache stores x / scale, rounded to nearest even and limited to ±448;
NaN stays NaN (Micikevicius et al., arXiv 2209.05433).

Legend: T tokens, HQ/HK query/KV heads, D head dim, P positions in the table, R rotated components, N blocks of S.
"""

import triton
import triton.language as tl
from torch import Tensor

from quire_kernels.fp8_linear.device_functions import to_float8
from quire_kernels.kv_cache import KVCache
from quire_kernels.store_kv import HeadNorm
from quire_kernels.triton_runtime.config import config_for
from quire_kernels.triton_runtime.debug import kernel
from quire_kernels.triton_runtime.device import require_device, require_fp8, target_of
from quire_kernels.triton_runtime.launch import Launch, cdiv, launches, next_power_of_2
from quire_kernels.triton_runtime.target import Target


@triton.jit
def _load_angles(cos_sin, position, HALF: tl.constexpr, HALF_BLOCK: tl.constexpr):
    """Return the cosines and sines of a position, [1, HALF_BLOCK] each; its padding (ones and zeros) has no effect."""
    component = tl.arange(0, HALF_BLOCK)[None, :]
    row = cos_sin + position * (2 * HALF)
    cos = tl.load(row + component, mask=component < HALF, other=1.0)
    sin = tl.load(row + HALF + component, mask=component < HALF, other=0.0)
    return cos, sin


@triton.jit
def _prepare_heads(
    x,  # the first component of every head, [HEADS, 1] pointers
    inside,  # [HEADS, 1]
    cos,  # [1, HALF_BLOCK]
    sin,
    weight,  # [D], not read unless NORM
    eps,
    D: tl.constexpr,
    HALF: tl.constexpr,
    HALF_BLOCK: tl.constexpr,
    TAIL_BLOCK: tl.constexpr,
    NORM: tl.constexpr,
):
    """Return normed and rotated heads in float32: the two halves of the rotated part, and the tail without rotation."""
    dtype = x.dtype.element_ty
    component = tl.arange(0, HALF_BLOCK)[None, :]
    rotated = component < HALF
    rest = 2 * HALF + tl.arange(0, TAIL_BLOCK)[None, :]
    first = tl.load(x + component, mask=inside & rotated, other=0.0).to(tl.float32)
    second = tl.load(x + HALF + component, mask=inside & rotated, other=0.0).to(tl.float32)
    tail = tl.load(x + rest, mask=inside & (rest < D), other=0.0).to(tl.float32)
    if NORM:
        total = tl.sum(first * first + second * second, axis=1) + tl.sum(tail * tail, axis=1)  # [HEADS]
        scale = tl.rsqrt(total / D + eps)[:, None]
        first_weight = tl.load(weight + component, mask=rotated, other=0.0).to(tl.float32)
        second_weight = tl.load(weight + HALF + component, mask=rotated, other=0.0).to(tl.float32)
        tail_weight = tl.load(weight + rest, mask=rest < D, other=0.0).to(tl.float32)
        first = (first * scale * first_weight).to(dtype).to(tl.float32)
        second = (second * scale * second_weight).to(dtype).to(tl.float32)
        tail = (tail * scale * tail_weight).to(dtype).to(tl.float32)
    return first * cos - second * sin, second * cos + first * sin, tail


@triton.jit
def _quantised(x, scale):
    """Return [HEADS, components] float32 as float8, divided by a [HEADS, 1] scale."""
    x = tl.div_rn(x, tl.broadcast_to(scale, x.shape))
    x = tl.maximum(x, -448.0, propagate_nan=tl.PropagateNan.ALL)
    x = tl.minimum(x, 448.0, propagate_nan=tl.PropagateNan.ALL)
    return to_float8(x)


@kernel(varying=["num_positions", "num_blocks"])
def _store_kv_kernel(
    q,  # [T, HQ, D]
    k,  # [T, HK, D]
    v,  # [T, HK, D]
    q_weight,  # [D], not read unless Q_NORM
    k_weight,  # [D], not read unless K_NORM
    cos_sin,  # [P, R]
    positions,  # [T]
    slots,  # [T]
    keys,  # [N, HK, S, D]
    values,  # [N, HK, S, D]
    key_scale,  # [HK], not read unless FP8
    value_scale,  # [HK]
    q_stride,
    k_stride,
    v_stride,
    q_eps,
    k_eps,
    num_positions,
    num_blocks,
    HQ: tl.constexpr,
    HK: tl.constexpr,
    D: tl.constexpr,
    S: tl.constexpr,
    HALF: tl.constexpr,
    HALF_BLOCK: tl.constexpr,
    TAIL_BLOCK: tl.constexpr,
    D_BLOCK: tl.constexpr,
    Q_HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    Q_NORM: tl.constexpr,
    K_NORM: tl.constexpr,
    FP8: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    group = tl.program_id(1)
    position = tl.load(positions + token)
    tl.device_assert((position >= 0) & (position < num_positions), "store_kv: positions leave the table")
    cos, sin = _load_angles(cos_sin, position, HALF, HALF_BLOCK)
    component = tl.arange(0, HALF_BLOCK)[None, :]
    rest = 2 * HALF + tl.arange(0, TAIL_BLOCK)[None, :]
    q_groups: tl.constexpr = (HQ + Q_HEADS - 1) // Q_HEADS
    # Each branch has its own names, because Triton requires one shape for names that both branches assign.
    if group < q_groups:
        q_head = group * Q_HEADS + tl.arange(0, Q_HEADS)[:, None]  # [Q_HEADS, 1]
        q_inside = q_head < HQ
        place = q + token * q_stride + q_head * D
        q_first, q_second, q_tail = _prepare_heads(
            place, q_inside, cos, sin, q_weight, q_eps, D, HALF, HALF_BLOCK, TAIL_BLOCK, Q_NORM
        )
        tl.store(place + component, q_first.to(q.dtype.element_ty), mask=q_inside & (component < HALF))
        tl.store(place + HALF + component, q_second.to(q.dtype.element_ty), mask=q_inside & (component < HALF))
        if Q_NORM:
            tl.store(place + rest, q_tail.to(q.dtype.element_ty), mask=q_inside & (rest < D))
    else:
        slot = tl.load(slots + token)
        tl.device_assert((slot >= 0) & (slot < num_blocks.to(tl.int64) * S), "store_kv: slots leave the cache")
        head = (group - q_groups) * KV_HEADS + tl.arange(0, KV_HEADS)[:, None]  # [KV_HEADS, 1]
        inside = head < HK
        first, second, tail = _prepare_heads(
            k + token * k_stride + head * D,
            inside,
            cos,
            sin,
            k_weight,
            k_eps,
            D,
            HALF,
            HALF_BLOCK,
            TAIL_BLOCK,
            K_NORM,
        )
        whole = tl.arange(0, D_BLOCK)[None, :]
        value = tl.load(v + token * v_stride + head * D + whole, mask=inside & (whole < D), other=0.0)
        if FP8:
            # Round to the heads' dtype first, so that the quantized value is that of an unquantized cache.
            scale = tl.load(key_scale + head, mask=inside, other=1.0)
            first = _quantised(first.to(k.dtype.element_ty).to(tl.float32), scale)
            second = _quantised(second.to(k.dtype.element_ty).to(tl.float32), scale)
            tail = _quantised(tail, scale)
            value = _quantised(value.to(tl.float32), tl.load(value_scale + head, mask=inside, other=1.0))
        stored = keys.dtype.element_ty
        row = ((slot // S * HK + head) * S + slot % S) * D  # [KV_HEADS, 1] int64
        tl.store(keys + row + component, first.to(stored), mask=inside & (component < HALF))
        tl.store(keys + row + HALF + component, second.to(stored), mask=inside & (component < HALF))
        tl.store(keys + row + rest, tail.to(stored), mask=inside & (rest < D))
        tl.store(values + row + whole, value.to(stored), mask=inside & (whole < D))


def store_kv(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cos_sin: Tensor,
    positions: Tensor,
    slots: Tensor,
    cache: KVCache,
    q_norm: HeadNorm | None,
    k_norm: HeadNorm | None,
) -> None:
    require_device("store_kv", q.device)
    quantised = cache.key_scale is not None
    if quantised:
        require_fp8("store_kv", q.device)
    tokens, q_heads, dim = q.shape
    if not tokens:
        return
    launch, groups = _launch(
        (q_heads, cache.kv_heads, dim, cos_sin.shape[1]),
        (cache.block_size, q_norm is not None, k_norm is not None, quantised),
        target_of(q.device),
    )
    # An argument that is not read still needs a pointer.
    launch(
        (tokens, groups),
        q,
        k,
        v,
        q if q_norm is None else q_norm.weight,
        k if k_norm is None else k_norm.weight,
        cos_sin,
        positions,
        slots,
        cache.keys,
        cache.values,
        cache.key_scale if quantised else cos_sin,
        cache.value_scale if quantised else cos_sin,
        q.stride(0),
        k.stride(0),
        v.stride(0),
        0.0 if q_norm is None else q_norm.eps,
        0.0 if k_norm is None else k_norm.eps,
        cos_sin.shape[0],
        cache.num_blocks,
    )


@launches
def _launch(
    shape: tuple[int, int, int, int], variant: tuple[int, bool, bool, bool], target: Target
) -> tuple[Launch, int]:
    """Return the launch, and the groups of heads of a token.

    shape    query heads, KV heads, head dim and rotated components
    variant  block size; whether queries, and keys, are normalized; whether the cache is of float8
    """
    block_size, q_norm, k_norm, quantised = variant
    q_heads, kv_heads, dim, rotated = shape
    block, half = next_power_of_2(dim), rotated // 2
    options = config_for("store_kv.store", target, f"block={block}").options
    group = options.pop("HEADS")
    launch = Launch(
        _store_kv_kernel,
        HQ=q_heads,
        HK=kv_heads,
        D=dim,
        S=block_size,
        HALF=half,
        HALF_BLOCK=next_power_of_2(max(half, 1)),
        TAIL_BLOCK=next_power_of_2(max(dim - 2 * half, 1)),
        D_BLOCK=block,
        Q_HEADS=min(group, next_power_of_2(q_heads)),
        KV_HEADS=min(group, next_power_of_2(kv_heads)),
        Q_NORM=q_norm,
        K_NORM=k_norm,
        FP8=quantised,
        **options,
    )
    return launch, cdiv(q_heads, launch.constants["Q_HEADS"]) + cdiv(kv_heads, launch.constants["KV_HEADS"])
