"""The cases of the kernels that multiply weights.

They are linear layers whose rows do not depend on the batch, layers of few rows, and layers in float8, compared with
torch's own, at Llama-3.1-8B's sizes, and mixtures of experts at Mixtral 8x7B's.

Legend: T tokens, K inputs, N outputs, H hidden size, I intermediate size, E experts.
"""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional

from benchmarks.kernels.kernel_cases import Case, Prepared, Result
from quire_kernels.fp8 import quantise_rows
from quire_kernels.fp8_linear import fp8_linear, quantise_weight
from quire_kernels.linear import linear
from quire_kernels.moe import Routes, fused_experts, route_tokens
from quire_kernels.moe import reference as moe_reference

_COMPARED_TOKENS = 8
"""The rows of a mixture of experts that are compared: its reference computes one token at a time."""


def cases() -> list[Case]:
    return [
        _linear(linear, 1, 4096, 28_672),
        _linear(linear, 32, 4096, 28_672, quick=True),
        _linear(linear, 256, 4096, 28_672),
        _linear(linear, 2048, 4096, 28_672),
        _fp8_linear(1, 4096, 28_672),
        _fp8_linear(32, 4096, 28_672, quick=True),
        _fp8_linear(2048, 4096, 28_672),
        _experts(1),
        _experts(32, quick=True),
        _experts(2048),
    ]


def tiny_cases() -> list[Case]:
    return [
        _linear(linear, 3, 64, 96),
        _fp8_linear(3, 64, 96),
        _experts(3, hidden=32, intermediate=64, experts=4),
    ]


def _linear(
    op: Callable[[Tensor, Tensor], Tensor], tokens: int, inputs: int, outputs: int, *, quick: bool = False
) -> Case:
    def prepare(device: torch.device, dtype: torch.dtype) -> Prepared:
        x = torch.randn(tokens, inputs, device=device).to(dtype)
        weight = (torch.randn(outputs, inputs, device=device) * inputs**-0.5).to(dtype)
        return Prepared(
            call=lambda: op(x, weight),
            expected=lambda: functional.linear(x.float(), weight.float()).to(dtype),
            bytes=weight.nbytes + x.nbytes + tokens * outputs * x.itemsize,
            flops=2 * tokens * inputs * outputs,
            peers={"torch": lambda: functional.linear(x, weight)},
        )

    kind = "batch-invariant, " if op is linear else ""
    name = f"{kind}{tokens:,} x {inputs:,} -> {outputs:,}"
    return Case(op=op.__name__, name=name, prepare=prepare, quick=quick)


def _fp8_linear(tokens: int, inputs: int, outputs: int, *, quick: bool = False) -> Case:
    def prepare(device: torch.device, dtype: torch.dtype) -> Prepared:
        x = torch.randn(tokens, inputs, device=device).to(dtype)
        weight = (torch.randn(outputs, inputs, device=device) * inputs**-0.5).to(dtype)
        weights = quantise_weight(weight)
        return Prepared(
            call=lambda: fp8_linear(x, weights),
            expected=lambda: (quantise_rows(x).dequantised() @ quantise_rows(weight).dequantised().t()).to(dtype),
            bytes=outputs * inputs + x.nbytes + tokens * outputs * x.itemsize,
            flops=2 * tokens * inputs * outputs,
            peers={"torch in 16 bits": lambda: functional.linear(x, weight)},
            compare_peers=False,
        )

    name = f"with quantization of rows, {tokens:,} x {inputs:,} -> {outputs:,}"
    return Case(op="fp8_linear", name=name, prepare=prepare, quick=quick)


def _experts(
    tokens: int,
    *,
    hidden: int = 4096,
    intermediate: int = 14_336,
    experts: int = 8,
    per_token: int = 2,
    quick: bool = False,
) -> Case:
    def prepare(device: torch.device, dtype: torch.dtype) -> Prepared:
        x = torch.randn(tokens, hidden, device=device).to(dtype)
        gate_up = torch.empty(experts, 2 * intermediate, hidden, dtype=dtype, device=device)
        down = torch.empty(experts, hidden, intermediate, dtype=dtype, device=device)
        gate_up.normal_(std=hidden**-0.5)
        down.normal_(std=intermediate**-0.5)
        logits = torch.randn(tokens, experts, device=device).to(dtype)
        routes = route_tokens(logits, per_token, normalise=True)
        some = Routes(experts=routes.experts[:_COMPARED_TOKENS], weights=routes.weights[:_COMPARED_TOKENS])

        def first(rows: Tensor) -> Result:
            return rows[:_COMPARED_TOKENS]

        def one_by_one() -> Tensor:
            """Compute each expert with torch's matrix products, over the tokens that selected it."""
            y = torch.zeros(tokens, hidden, dtype=torch.float32, device=device)
            for expert in range(experts):
                token, place = (routes.experts == expert).nonzero(as_tuple=True)
                gate, up = functional.linear(x[token], gate_up[expert]).chunk(2, dim=1)
                made = functional.linear(functional.silu(gate) * up, down[expert])
                y.index_add_(0, token, made.float() * routes.weights[token, place, None])
            return y.to(dtype)

        chosen = int(routes.experts.unique().numel())
        return Prepared(
            call=lambda: fused_experts(x, routes, gate_up, down, gelu=False),
            compared=first,
            expected=lambda: moe_reference.fused_experts(x[:_COMPARED_TOKENS], some, gate_up, down, False),
            bytes=chosen * (gate_up[0].nbytes + down[0].nbytes) + 2 * x.nbytes,
            flops=6 * tokens * per_token * hidden * intermediate,
            peers={"torch, expert by expert": one_by_one},
        )

    name = f"{tokens:,} tokens, {per_token} of {experts} experts, {hidden:,} x {intermediate:,}"
    return Case(op="moe", name=name, prepare=prepare, quick=quick)
