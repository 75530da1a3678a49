"""The cases of the ops around attention, at Llama-3.1-8B's sizes.

They are norms, activations, and rotary with the write of keys and values.

Legend: T tokens, H hidden size, I intermediate size, HQ/HK query/KV heads, D head dim, C blocks.
"""

import torch
from torch import Tensor
from torch.nn import functional

from benchmarks.kernels.kernel_cases import Case, Prepared, Result
from quire_kernels.activation import reference as activation_reference
from quire_kernels.activation import silu_and_mul, silu_and_mul_fp8
from quire_kernels.fp8 import Fp8Rows, quantise_rows
from quire_kernels.kv_cache import FP8, KVCache, allocate_kv_cache
from quire_kernels.rms_norm import reference as norm_reference
from quire_kernels.rms_norm import rms_norm, rms_norm_fp8
from quire_kernels.store_kv import reference as store_reference
from quire_kernels.store_kv import rotary_table, store_kv

_EPS = 1e-5


def cases() -> list[Case]:
    return [
        _norm(32, 4096, residual=True),
        _norm(4096, 4096, residual=True, quick=True),
        _norm(4096, 4096, residual=False),
        _norm(4096 * 32, 128, residual=False),
        _activation(32, 14_336),
        _activation(4096, 14_336, quick=True),
        _norm_to_fp8(32, 4096),
        _norm_to_fp8(4096, 4096),
        _activation_to_fp8(32, 14_336),
        _activation_to_fp8(4096, 14_336),
        _store(32, heads=32, kv_heads=8, head_dim=128),
        _store(4096, heads=32, kv_heads=8, head_dim=128, quick=True),
        _store(4096, heads=32, kv_heads=8, head_dim=128, fp8=True),
    ]


def tiny_cases() -> list[Case]:
    return [
        _norm(3, 96, residual=True),
        _norm(5, 64, residual=False),
        _activation(3, 96),
        _norm_to_fp8(5, 64),
        _activation_to_fp8(3, 96),
        _store(5, heads=4, kv_heads=2, head_dim=64),
    ]


def _norm(rows: int, width: int, *, residual: bool, quick: bool = False) -> Case:
    def prepare(device: torch.device, dtype: torch.dtype) -> Prepared:
        x, weight = (torch.randn(*shape, device=device).to(dtype) for shape in ((rows, width), (width,)))
        added = torch.randn(rows, width, device=device).to(dtype) if residual else None

        def torch_norm() -> Result:
            if added is None:
                return functional.rms_norm(x, (width,), weight, _EPS)
            added.add_(x)
            return functional.rms_norm(added, (width,), weight, _EPS)

        def fresh() -> Tensor | None:
            return None if added is None else added.clone()

        def with_sum(normed: Tensor, total: Tensor | None) -> Result:
            return normed if total is None else [normed, total]

        def result() -> Result:
            total = fresh()
            return with_sum(rms_norm(x, weight, _EPS, total), total)

        def expected() -> Result:
            total = fresh()
            return with_sum(norm_reference.rms_norm(x, weight, _EPS, total), total)

        return Prepared(
            call=lambda: rms_norm(x, weight, _EPS, added),
            result=result,
            expected=expected,
            bytes=x.nbytes * (4 if residual else 2),
            peers={"torch": torch_norm},
            compare_peers=not residual,
        )

    what = "with residual" if residual else "alone"
    return Case(op="rms_norm", name=f"{rows:,} x {width:,} {what}", prepare=prepare, quick=quick)


def _activation(rows: int, width: int, *, quick: bool = False) -> Case:
    def prepare(device: torch.device, dtype: torch.dtype) -> Prepared:
        gate_up = torch.randn(rows, 2 * width, device=device).to(dtype)

        def in_torch() -> Tensor:
            gate, up = gate_up.chunk(2, dim=1)
            return functional.silu(gate) * up

        return Prepared(
            call=lambda: silu_and_mul(gate_up),
            expected=lambda: activation_reference.silu_and_mul(gate_up),
            bytes=gate_up.nbytes * 3 // 2,
            peers={"torch": in_torch},
        )

    return Case(op="activation", name=f"silu and mul {rows:,} x {width:,}", prepare=prepare, quick=quick)


# A row's values may be rounded the other way: one step of the three bits of float8.
_FP8_BOUND = 0.07


def _dequantised(rows: Fp8Rows) -> Tensor:
    return rows.dequantised()


def _norm_to_fp8(rows: int, width: int) -> Case:
    def prepare(device: torch.device, dtype: torch.dtype) -> Prepared:
        x, weight = (torch.randn(*shape, device=device).to(dtype) for shape in ((rows, width), (width,)))
        return Prepared(
            call=lambda: rms_norm_fp8(x, weight, _EPS),
            compared=_dequantised,
            expected=lambda: quantise_rows(norm_reference.rms_norm(x, weight, _EPS)).dequantised(),
            bytes=x.nbytes + x.numel(),
            bound=_FP8_BOUND,
        )

    return Case(op="rms_norm", name=f"{rows:,} x {width:,} alone, to fp8", prepare=prepare)


def _activation_to_fp8(rows: int, width: int) -> Case:
    def prepare(device: torch.device, dtype: torch.dtype) -> Prepared:
        gate_up = torch.randn(rows, 2 * width, device=device).to(dtype)
        return Prepared(
            call=lambda: silu_and_mul_fp8(gate_up),
            compared=_dequantised,
            expected=lambda: quantise_rows(activation_reference.silu_and_mul(gate_up)).dequantised(),
            bytes=gate_up.nbytes + rows * width,
            bound=_FP8_BOUND,
        )

    return Case(op="activation", name=f"silu and mul {rows:,} x {width:,}, to fp8", prepare=prepare)


def _store(tokens: int, *, heads: int, kv_heads: int, head_dim: int, fp8: bool = False, quick: bool = False) -> Case:
    def prepare(device: torch.device, dtype: torch.dtype) -> Prepared:
        def projected(count: int) -> Tensor:
            return torch.randn(tokens, count, head_dim, device=device).to(dtype)

        q, k, v = projected(heads), projected(kv_heads), projected(kv_heads)
        frequencies = 10_000.0 ** -(torch.arange(0, head_dim, 2) / head_dim)
        table = rotary_table(frequencies, 8192).to(device)
        positions = torch.randint(8192, (tokens,), device=device)
        cache = _cache(-(-2 * tokens // 16), kv_heads, head_dim, FP8 if fp8 else dtype, device)
        slots = torch.randperm(cache.num_blocks * 16, device=device)[:tokens]

        def stored(op: object) -> Result:
            target = _cache(cache.num_blocks, kv_heads, head_dim, cache.keys.dtype, device)
            queries, keys = q.clone(), k.clone()
            op(queries, keys, v, table, positions, slots, target)  # type: ignore[operator]
            return [queries, target.keys.float(), target.values.float()]

        # A float8 value may be rounded the other way: one step of its three bits.
        bound = 0.07 if fp8 else None
        written = 2 * k.numel() * cache.keys.itemsize
        return Prepared(
            call=lambda: store_kv(q, k, v, table, positions, slots, cache),
            result=lambda: stored(store_kv),
            expected=lambda: stored(store_reference.store_kv),
            bound=bound if bound is not None else (2e-2 if dtype == torch.bfloat16 else 5e-3),
            bytes=2 * q.nbytes + k.nbytes + v.nbytes + written + tokens * head_dim * 4,
        )

    kind = ", float8 cache" if fp8 else ""
    name = f"rotary and write, {tokens:,} tokens, {heads}/{kv_heads} heads of {head_dim}{kind}"
    return Case(op="store_kv", name=name, prepare=prepare, quick=quick)


def _cache(blocks: int, kv_heads: int, head_dim: int, dtype: torch.dtype, device: torch.device) -> KVCache:
    return allocate_kv_cache(
        num_blocks=blocks, block_size=16, kv_heads=kv_heads, head_dim=head_dim, dtype=dtype, device=device
    )
