"""The launches that are compiled ahead of time: those of calls with the sizes that are served.

A call gets tensors without memory and runs the op's own host code for a GPU of the target, so that a case has exactly
the arguments of a launch in service. Its launches are recorded instead of run.
"""

import contextlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import torch
from torch import Tensor

from quire_kernels.activation import kernel as activation
from quire_kernels.errors import UnsupportedDeviceError
from quire_kernels.fp8_linear import kernel as fp8_linear
from quire_kernels.kv_cache import FP8, KVCache
from quire_kernels.linear import kernel as linear
from quire_kernels.logit_shaping import NUM_BOUNDS, TAIL, LogitEdits
from quire_kernels.logit_shaping import kernel as logit_shaping
from quire_kernels.logprobs import kernel as logprobs
from quire_kernels.lora import TokenGroups, allocate_slots
from quire_kernels.lora import kernel as lora
from quire_kernels.moe import Routes
from quire_kernels.moe import kernel as moe
from quire_kernels.paged_attention import kernel as paged_attention
from quire_kernels.paged_attention.plan import allocate_workspace
from quire_kernels.paged_attention.schedule import ONE
from quire_kernels.rms_norm import kernel as rms_norm
from quire_kernels.sampling import kernel as sampling
from quire_kernels.store_kv import kernel as store_kv
from quire_kernels.swap_blocks import kernel as swap_blocks
from quire_kernels.triton_runtime import device
from quire_kernels.triton_runtime.launch import Launch
from quire_kernels.triton_runtime.target import Target

META = torch.device("meta")
BF16, FP16, FP32, INT32, INT64 = torch.bfloat16, torch.float16, torch.float32, torch.int32, torch.int64
_NAMES = {BF16: "bf16", FP16: "fp16", FP32: "fp32", INT32: "i32", INT64: "i64", FP8: "fp8e4nv"}
_PROCESSORS = 132
_ROWS, _VOCABULARY = 5, 128_256
_ONCE = ("_join_kernel", "sort_kernel", "sum_kernel")
"""Kernels whose resources hardly depend on the sizes: they are compiled for the first call."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AotCase:
    """One compilation of a kernel.

    name             unique within the op, the same on every target: the key of its bounds
    signature        every argument that is no constant, by name, with Triton's types; None for an absent one. A suffix
                     is what the launcher finds out about a value: ":16" divisible by 16, ":1" equal to 1
    programs_per_sm  the programs that a persistent launch expects to run on one multiprocessor at once
    decode_path      whether it runs in a decode step: then it may use neither stack nor local memory on GPUs of data
                     centers (``NO_SPILL_TARGETS`` of the bounds)
    """

    name: str
    launch: Launch
    signature: Mapping[str, str | None]
    programs_per_sm: int = 1
    decode_path: bool = True


def cases_of(op: str, target: Target) -> list[AotCase]:
    """Return the launches of an op, each once. What the target cannot run (float8) is left out."""
    cases: dict[object, AotCase] = {}
    with _launches_for(target) as seen:
        for name, call in CALLS[op]().items():
            seen.clear()
            with contextlib.suppress(UnsupportedDeviceError):
                call()
            for case in [_case(name, *launched) for launched in seen]:
                kernel = case.launch.kernel
                rest = () if kernel.__name__ in _ONCE else (repr(case.launch.constants), repr(case.signature))
                cases.setdefault((kernel, *rest), case)
    return list(cases.values())


@contextlib.contextmanager
def _launches_for(target: Target) -> Iterator[list[tuple[Launch, tuple[int, ...], tuple[Any, ...]]]]:
    """Let ops see a GPU of the target, and yield the list of their launches."""
    seen: list[tuple[Launch, tuple[int, ...], tuple[Any, ...]]] = []
    properties = device.DeviceProperties(
        name=target.name,
        capability=divmod(target.capability, 10),
        amd=target.amd,
        multiprocessors=_PROCESSORS,
        shared_memory_bytes=0,
    )
    cached = (device.device_properties, device.target_of, device.require_fp8, device._require_capability)
    gpu = device._CpuDevice(properties=properties, target=target)
    with (
        mock.patch.object(device, "_cpu_device", gpu),
        mock.patch.object(Launch, "__call__", lambda self, grid, *arguments: seen.append((self, grid, arguments))),
        contextlib.ExitStack() as after,
    ):
        for function in cached:
            function.cache_clear()
            after.callback(function.cache_clear)
        yield seen


def _case(name: str, launch: Launch, grid: tuple[int, ...], arguments: tuple[Any, ...]) -> AotCase:
    signature = {
        parameter.name: _kind(argument, varies=parameter.do_not_specialize)
        for parameter, argument in zip(launch.kernel.params, arguments, strict=False)
    }
    kind = launch.constants.get("LIST")  # attention only: of its lists of items, the first is that of decoding
    variant = " gated" if launch.constants.get("GATED") else "" if kind is None else f" list {kind}"
    return AotCase(
        name=f"{launch.kernel.__name__.strip('_').removesuffix('_kernel')}{variant} {name}",
        launch=launch,
        signature=signature,
        programs_per_sm=1 if kind is None else grid[0] // _PROCESSORS,
        decode_path=kind in (None, ONE),
    )


def _kind(argument: Any, *, varies: bool) -> str | None:
    if argument is None:
        return None
    if isinstance(argument, Tensor):
        return f"*{_NAMES[argument.dtype]}:16"
    if isinstance(argument, float):
        return "fp32"
    kind = "i32" if -(1 << 31) <= argument < 1 << 31 else "i64"
    if varies or argument % 16 and argument != 1:
        return kind
    return f"{kind}:{1 if argument == 1 else 16}"


# --- the calls, by name ---

Calls = dict[str, Callable[[], object]]


def _empty(dtype: torch.dtype, *shape: int) -> Tensor:
    return torch.empty(shape, dtype=dtype, device=META)


def _activation() -> Calls:
    def call(dtype: torch.dtype, width: int, op: str) -> Callable[[], object]:
        return lambda: getattr(activation, op)(_empty(dtype, _ROWS, 2 * width))

    calls = {f"{_NAMES[dtype]} {width}": call(dtype, width, "silu_and_mul") for dtype, width in _WIDTHS}
    calls["gelu bf16 14336"] = call(BF16, 14_336, "gelu_tanh_and_mul")
    for width in (8192, 14_336, 28_672):
        gate_up = _empty(BF16, _ROWS, 2 * width)
        calls[f"{width} to fp8"] = partial(activation.gated_fp8, "silu_and_mul", gate_up)
    return calls


_WIDTHS = ((BF16, 1536), (BF16, 14_336), (FP16, 14_336))


def _fp8_linear() -> Calls:
    return {f"bf16 {width}": partial(fp8_linear.quantise_rows, _empty(BF16, _ROWS, width)) for width in (4096, 14_336)}


def _linear() -> Calls:
    def call(dtype: torch.dtype, rows: int, outputs: int, *, bias: bool) -> Callable[[], object]:
        x, weight = _empty(dtype, rows, 4096), _empty(dtype, outputs, 4096)
        return lambda: linear.linear(x, weight, _empty(dtype, outputs) if bias else None)

    return {
        "bf16 whole": call(BF16, 1024, 28_672, bias=True),
        "bf16 splits in turn": call(BF16, 4096, 4096, bias=False),
        "bf16 splits apart": call(BF16, 1, 4096, bias=False),
        "fp16 splits in turn": call(FP16, 4096, 4096, bias=False),
        "fp32 splits in turn": call(FP32, 4096, 4096, bias=False),
    }


def _logit_shaping() -> Calls:
    rows = _empty(INT64, _ROWS)
    edits = LogitEdits(
        ids=_empty(INT32, 1000),
        values=_empty(FP32, 1000),
        bounds=_empty(INT64, _ROWS, NUM_BOUNDS),
        penalties=_empty(FP32, _ROWS, 3),
        min_tokens=rows,
        num_drawn=rows,
        tails=_empty(INT32, _ROWS, TAIL),
    )
    return {
        "logits": lambda: logit_shaping.shape_logits(_empty(FP32, _ROWS, _VOCABULARY), rows, rows, edits),
        "tokens": lambda: logit_shaping.count_tokens(rows, rows, edits),
    }


def _logprobs() -> Calls:
    lines = _empty(INT64, _ROWS)
    return {
        _NAMES[dtype]: partial(logprobs.token_logprobs, _empty(dtype, _ROWS, _VOCABULARY), lines, lines, 20)
        for dtype in (BF16, FP32)
    }


def _sampling() -> Calls:
    numbers, integers = _empty(FP32, _ROWS), _empty(INT64, _ROWS)
    settings = (numbers, integers, numbers, numbers, numbers, integers, integers)
    calls: Calls = {
        _NAMES[dtype]: partial(sampling.sample, _empty(dtype, _ROWS, _VOCABULARY), *settings) for dtype in (FP32, BF16)
    }
    return {**calls, "greedy": lambda: sampling.greedy(_empty(FP32, _ROWS, _VOCABULARY))}


def _lora() -> Calls:
    """Return calls with the layers of Llama 3 8B: rank 16 for each kind of layer, and once rank 64."""
    groups = TokenGroups(order=_empty(INT32, _ROWS), blocks=_empty(INT32, 3, 3))

    def call(dtype: torch.dtype, rank: int, inputs: int, parts: tuple[int, ...]) -> Callable[[], object]:
        layer = allocate_slots(slots=3, max_rank=rank, inputs=inputs, parts=parts, dtype=dtype, device=META)
        y, x = _empty(dtype, _ROWS, sum(parts)), _empty(dtype, _ROWS, inputs)
        return lambda: lora.add_adapters(y, x, layer, groups)

    qkv, down = (4096, (4096, 1024, 1024)), (14_336, (4096,))
    return {
        "bf16 qkv r16": call(BF16, 16, *qkv),
        "bf16 down r16": call(BF16, 16, *down),
        "bf16 qkv r64": call(BF16, 64, *qkv),
        "fp16 qkv r16": call(FP16, 16, *qkv),
    }


def _moe() -> Calls:
    """Return calls with the sizes of Qwen3-30B-A3B, and the products also with those of Mixtral 8x7B."""

    def call(tokens: int, experts: int, hidden: int, inner: int, per_token: int) -> Callable[[], object]:
        routes = Routes(experts=_empty(INT64, tokens, per_token), weights=_empty(FP32, tokens, per_token))
        x, gate_up = _empty(BF16, tokens, hidden), _empty(BF16, experts, 2 * inner, hidden)
        return lambda: moe.fused_experts(x, routes, gate_up, _empty(BF16, experts, hidden, inner), False, False)

    qwen = (128, 2048, 768, 8)
    return {
        "bf16 e128 k8": lambda: moe.route_tokens(_empty(BF16, _ROWS, 128), 8, True),
        "bf16 h2048 i768": call(1024, *qwen),
        "bf16 h2048 i768 few": call(_ROWS, *qwen),
        "bf16 h2048 i768 many": call(4096, *qwen),
        "bf16 h4096 i14336": call(256, 8, 4096, 14_336, 2),
    }


def _rms_norm() -> Calls:
    def call(dtype: torch.dtype, width: int, *, add: bool = True, op: str = "rms_norm") -> Callable[[], object]:
        x, weight = _empty(dtype, _ROWS, width), _empty(dtype, width)
        return lambda: getattr(rms_norm, op)(x, weight, 1e-5, _empty(dtype, _ROWS, width) if add else None)

    return {
        **{f"bf16 {width} residual": call(BF16, width) for width in (576, 4096, 8192, 16_384)},
        **{f"bf16 {width}": call(BF16, width, add=False) for width in (128, 4096)},
        "fp16 4096 residual": call(FP16, 4096),
        "fp32 576 residual": call(FP32, 576),
        **{f"bf16 {width} residual to fp8": call(BF16, width, op="rms_norm_fp8") for width in (4096, 8192)},
    }


def _cache(dtype: torch.dtype, *, head_dim: int, block_size: int = 16, place: torch.device = META) -> KVCache:
    blocks = torch.empty((9, 8, block_size, head_dim), dtype=dtype, device=place)
    scale = _empty(FP32, 8) if dtype == FP8 else None
    return KVCache(
        keys=blocks,
        values=blocks,
        num_blocks=9,
        block_size=block_size,
        kv_heads=8,
        head_dim=head_dim,
        keys_transposed=False,
        key_scale=scale,
        value_scale=scale,
    )


def _store_kv() -> Calls:
    def call(
        dtype: torch.dtype, dim: int, *, rotated: int = 0, norm: bool = False, cache: torch.dtype | None = None
    ) -> Callable[[], object]:
        q, k, v = _empty(dtype, _ROWS, 48, dim).split((32, 8, 8), dim=1)
        weights = SimpleNamespace(weight=_empty(dtype, dim), eps=1e-6) if norm else None
        rows, table = _empty(INT64, _ROWS), _empty(FP32, 100, rotated or dim)
        target = _cache(cache or dtype, head_dim=dim)
        return lambda: store_kv.store_kv(q, k, v, table, rows, rows, target, weights, weights)

    return {
        **{f"bf16 d{dim}": call(BF16, dim) for dim in (64, 80, 128)},
        **{f"bf16 d{dim} norm": call(BF16, dim, norm=True) for dim in (128, 256)},
        "bf16 d96 r32": call(BF16, 96, rotated=32),
        "fp16 d128": call(FP16, 128),
        "bf16 d128 norm fp8": call(BF16, 128, norm=True, cache=FP8),
    }


def _swap_blocks() -> Calls:
    blocks, here = _empty(INT64, _ROWS), _cache(BF16, head_dim=128)
    host = _cache(BF16, head_dim=128, place=torch.device("cpu"))
    return {
        "from or to the host": lambda: swap_blocks.swap_blocks([here], [host], blocks, blocks),
        "within the device": lambda: swap_blocks.swap_blocks([here], [here], blocks, blocks),
    }


@dataclass(frozen=True, slots=True, kw_only=True)
class _Layer:
    """Layers of bfloat16 queries with 8 KV heads, over a batch with one sequence of each length in ``queries``."""

    head_dim: int = 128
    group: int = 4
    cache: torch.dtype = BF16
    block_size: int = 16
    window: int | None = None
    sinks: bool = False
    soft_cap: float | None = None
    fixed: bool = False
    queries: tuple[int, ...] = (1, 100)

    def __call__(self) -> object:
        # So many that a launch for each list has as many programs as the device runs at once.
        lens = np.repeat(self.queries, 256)
        tokens, heads = int(lens.sum()), 8 * self.group
        sizes: dict[str, Any] = {"max_tokens": tokens, "heads": heads, "head_dim": self.head_dim, "device": META}
        workspace = allocate_workspace(**sizes, split_tokens=512) if self.fixed else None
        plan = paged_attention.plan_attention(
            _empty(INT32, len(lens), 1024), lens, lens, self.block_size, self.window, False, workspace, self.fixed
        )
        q, sinks = _empty(BF16, tokens, heads, self.head_dim), _empty(BF16, heads) if self.sinks else None
        cache = _cache(self.cache, head_dim=self.head_dim, block_size=self.block_size)
        return paged_attention.paged_attention(q, cache, plan, 0.1, self.soft_cap, sinks, None)


def _paged_attention() -> Calls:
    """Return calls with the shapes that are served; each option (dtype, head dim, block size) occurs."""
    drafts = (1, 4, 100)
    layers = {
        "d128 g4": _Layer(queries=drafts),
        # A tile with a vector of block ids, and one with a single id.
        "d128 g4 window sinks block 64": _Layer(block_size=64, window=1000, sinks=True),
        "d64 g8 window sinks": _Layer(head_dim=64, group=8, window=1000, sinks=True),
        "d80 g1": _Layer(head_dim=80, group=1),
        "d256 g2 soft cap": _Layer(head_dim=256, group=2, soft_cap=50.0, queries=drafts),
        "d128 g4 fp8 cache": _Layer(cache=FP8),
        "d128 g4 fixed": _Layer(fixed=True),
        "d128 g4 window fixed": _Layer(fixed=True, window=1000),
    }
    # Decoding with every group, head dim and mask that changes the registers, each of which the launch counts on.
    decoding = {f"d128 g{group}": _Layer(group=group) for group in (1, 2, 3, 5, 6, 7, 8)} | {
        "d128 g8 window": _Layer(group=8, window=1000),
        "d128 g4 soft cap": _Layer(soft_cap=50.0),
        "d128 g4 block 128": _Layer(block_size=128),
        "d64 g4": _Layer(head_dim=64),
        "d96 g1": _Layer(head_dim=96, group=1),
        "d256 g8 window": _Layer(head_dim=256, group=8, window=1000),
    }
    return {**layers, **{name: replace(layer, queries=(1,)) for name, layer in decoding.items()}}


CALLS: Mapping[str, Callable[[], Calls]] = {
    "activation": _activation,
    "fp8_linear": _fp8_linear,
    "linear": _linear,
    "logit_shaping": _logit_shaping,
    "logprobs": _logprobs,
    "lora": _lora,
    "moe": _moe,
    "paged_attention": _paged_attention,
    "rms_norm": _rms_norm,
    "sampling": _sampling,
    "store_kv": _store_kv,
    "swap_blocks": _swap_blocks,
}
