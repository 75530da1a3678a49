"""Mixtures of experts in Triton: routes and sums equal the reference's for any routing."""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from quire_kernels.dispatch import INTERPRETED
from quire_kernels.errors import ArgumentError, UnsupportedDeviceError
from quire_kernels.moe import Routes, apply_experts, fused_experts, reference, route_tokens
from quire_kernels.moe.kernel import config_key, most_blocks, sort_assignments
from quire_kernels.triton_runtime import config
from quire_kernels.triton_runtime.config import config_for
from quire_kernels.triton_runtime.device import target_of

Strided = Callable[..., Tensor]
AssertClose = Callable[[Tensor, Tensor], None]


pytestmark = pytest.mark.usefixtures("poisoned")


@pytest.mark.parametrize(
    ("tokens", "experts", "per_token", "normalise"),
    [(1, 8, 2, True), (4, 5, 5, False), (5, 128, 8, True), (3, 1, 1, True), (0, 4, 2, False)],
)
def test_routes_equal_the_reference(
    tokens: int, experts: int, per_token: int, normalise: bool, dtype: torch.dtype, strided: Strided
) -> None:
    logits = strided(tokens, experts, dtype=dtype)
    found = route_tokens(logits, per_token, normalise=normalise)
    expected = reference.route_tokens(logits.cpu(), per_token, normalise)
    # 16 bits produce equal values, whose order is undefined.
    if dtype == torch.float32:
        assert torch.equal(found.experts.cpu(), expected.experts)
    torch.testing.assert_close(found.weights.cpu(), expected.weights)


# The interpreter's numpy warns of infinities and NaN, on which the kernels rely as in IEEE 754.
@pytest.mark.filterwarnings("ignore:.*encountered in:RuntimeWarning")
def test_first_of_equally_probable_experts_are_chosen(device: torch.device) -> None:
    logits = torch.zeros(3, 6, device=device)
    logits[1, [2, 5]] = 1.0
    logits[2] = torch.nan
    assert route_tokens(logits, 3, normalise=True).experts.tolist() == [[0, 1, 2], [2, 5, 0], [0, 1, 2]]


class Layer:
    def __init__(self, experts: int, hidden: int, inner: int, dtype: torch.dtype, device: torch.device) -> None:
        self.gate_up = (torch.randn(experts, 2 * inner, hidden) * hidden**-0.5).to(dtype).to(device)
        self.down = (torch.randn(experts, hidden, inner) * inner**-0.5).to(dtype).to(device)

    def __call__(self, x: Tensor, routes: Routes, *, gelu: bool = False, deterministic: bool = False) -> Tensor:
        return fused_experts(x, routes, self.gate_up, self.down, gelu=gelu, deterministic=deterministic)

    def expected(self, x: Tensor, routes: Routes, *, gelu: bool = False) -> Tensor:
        on_cpu = Routes(experts=routes.experts.cpu(), weights=routes.weights.cpu())
        return reference.fused_experts(x.cpu(), on_cpu, self.gate_up.cpu(), self.down.cpu(), gelu)


def routed(chosen: Tensor, device: torch.device) -> Routes:
    return Routes(experts=chosen.to(device), weights=torch.rand(chosen.shape).to(device))


@pytest.mark.parametrize(
    ("tokens", "experts", "per_token", "hidden", "inner", "gelu"),
    [
        (1, 8, 2, 64, 32, False),
        (3, 128, 8, 16, 16, False),
        (2, 3, 3, 96, 70, False),
        (0, 4, 2, 16, 16, False),
    ],
)
def test_experts_equal_the_reference(
    tokens: int,
    experts: int,
    per_token: int,
    hidden: int,
    inner: int,
    gelu: bool,
    device: torch.device,
    assert_close: AssertClose,
) -> None:
    layer = Layer(experts, hidden, inner, torch.float16, device)
    x = torch.randn(tokens, hidden).half().to(device)
    routes = route_tokens(torch.randn(tokens, experts).to(device), per_token, normalise=True)
    assert_close(layer(x, routes, gelu=gelu).cpu(), layer.expected(x, routes, gelu=gelu))


def test_every_dtype_is_multiplied(dtype: torch.dtype, device: torch.device, assert_close: AssertClose) -> None:
    layer = Layer(5, 33, 40, dtype, device)
    x = torch.randn(37, 33).to(dtype).to(device)
    routes = route_tokens(torch.randn(37, 5).to(device), 2, normalise=True)
    assert_close(layer(x, routes, gelu=True).cpu(), layer.expected(x, routes, gelu=True))


@pytest.mark.parametrize(
    "chosen",
    [
        torch.full((40, 1), 3),
        torch.tensor([[6, 0]] * 17),
        torch.tensor([[0, 5]] * 16 + [[5, 6]] * 16),
        torch.tensor([[6, 6]] * 3),
    ],
    ids=["all-to-one", "first-and-last", "whole-blocks", "one-twice"],
)
def test_experts_without_tokens_are_skipped(chosen: Tensor, device: torch.device, assert_close: AssertClose) -> None:
    layer = Layer(7, 32, 16, torch.float32, device)
    used = chosen.unique()
    for expert in range(7):
        if expert not in used:
            layer.gate_up[expert] = layer.down[expert] = torch.nan
    x, routes = torch.randn(chosen.shape[0], 32).to(device), routed(chosen, device)
    assert_close(layer(x, routes).cpu(), layer.expected(x, routes))


def test_result_of_a_token_does_not_depend_on_its_batch(device: torch.device) -> None:
    # In float32 the interpreter's products, which are numpy's, depend on the place of a row in its block.
    layer = Layer(4, 48, 40, torch.float16, device)
    x = torch.randn(35, 48).half().to(device)
    routes = route_tokens(torch.randn(35, 4).to(device), 2, normalise=True)
    together = layer(x, routes, deterministic=True)
    for token in (0, 17, 34):
        own = slice(token, token + 1)
        alone = layer(x[own], Routes(experts=routes.experts[own], weights=routes.weights[own]), deterministic=True)
        assert torch.equal(alone, together[own])
    order = torch.randperm(35).to(device)
    moved = Routes(experts=routes.experts[order], weights=routes.weights[order])
    shuffled = layer(x[order], moved, deterministic=True)
    assert torch.equal(shuffled, together[order])


@pytest.mark.parametrize(
    ("assignments", "experts", "element_bytes", "deterministic", "key"),
    [
        (8, 128, 2, False, "bytes=2 few"),
        (2048, 128, 2, False, "bytes=2 few"),
        (2056, 128, 2, False, "bytes=2"),
        (16_383, 128, 2, False, "bytes=2"),
        (16_384, 128, 2, False, "bytes=2 many"),
        (16_384, 128, 2, True, "bytes=2"),
        (8, 128, 2, True, "bytes=2"),
        (8, 128, 4, False, "bytes=4"),
    ],
)
def test_tiles_follow_the_tokens_per_expert(
    assignments: int, experts: int, element_bytes: int, deterministic: bool, key: str
) -> None:
    assert config_key(assignments, experts, element_bytes, deterministic=deterministic) == key


def test_many_tokens_per_expert_equal_the_reference(device: torch.device, assert_close: AssertClose) -> None:
    layer = Layer(1, 32, 32, torch.float16, device)
    x = torch.randn(130, 32).half().to(device)
    routes = routed(torch.zeros(130, 1, dtype=torch.int64), device)
    config.forget()
    found = layer(x, routes)
    assert ("moe.gate_up", "bytes=2 many") in {(kernel, key) for kernel, _, key in config._known}
    assert_close(found.cpu(), layer.expected(x, routes))


@pytest.mark.parametrize(("assignments", "experts", "rows"), [(1, 1, 16), (300, 5, 16), (64, 40, 16), (200, 3, 64)])
def test_assignments_are_sorted_by_expert_and_divided_into_blocks(
    assignments: int, experts: int, rows: int, device: torch.device
) -> None:
    chosen = torch.randint(experts, (assignments, 1))
    order, blocks, count = sort_assignments(routed(chosen, device), experts, rows, target_of(device))
    assert order.tolist() == torch.argsort(chosen[:, 0], stable=True).tolist()
    expected, start = [], 0
    for expert, number in enumerate(torch.bincount(chosen[:, 0], minlength=experts).tolist()):
        end = start + number
        expected += [[expert, first, min(first + rows, end)] for first in range(start, end, rows)]
        start = end
    assert blocks[: int(count)].tolist() == expected


def test_both_products_may_have_blocks_of_different_heights(
    device: torch.device, use_blocks: Callable[..., None], assert_close: AssertClose
) -> None:
    layer = Layer(3, 32, 32, torch.float32, device)
    x, routes = torch.randn(50, 32).to(device), routed(torch.randint(3, (50, 2)), device)
    down = config_for("moe.down", target_of(device), "bytes=4")
    use_blocks("moe.down", BLOCK_M=2 * down.blocks["BLOCK_M"])
    assert_close(layer(x, routes).cpu(), layer.expected(x, routes))


@pytest.mark.parametrize("counts", [[0, 0, 1], [16, 16], [17, 1, 1, 1], [1] * 128, [160]])
def test_the_grid_has_room_for_every_block(counts: list[int]) -> None:
    needed = sum(-(-count // 16) for count in counts)
    assert needed <= most_blocks(sum(counts), len(counts), 16) <= sum(counts)


@pytest.mark.skipif(not INTERPRETED, reason="on a GPU only the debug build checks, and what it finds ends the process")
@pytest.mark.parametrize("expert", [-1, 3])
def test_debug_builds_refuse_a_missing_expert(expert: int, device: torch.device) -> None:
    layer, routes = Layer(3, 16, 16, torch.float32, device), routed(torch.tensor([[0], [expert]]), device)
    with pytest.raises(Exception, match="fused_experts: routes name an expert that there is not"):
        layer(torch.randn(2, 16), routes)


def test_invalid_arguments_are_refused(device: torch.device) -> None:
    layer, routes = Layer(3, 16, 8, torch.float32, device), routed(torch.tensor([[0], [1]]), device)
    x = torch.randn(2, 16).to(device)
    for message, change in (
        (r"gate_up has shape \(3, 15, 16\)", {"gate_up": layer.gate_up[:, :15]}),
        (r"gate_up is .* a contiguous torch.float32 \(3, 16, 16\)", {"gate_up": layer.gate_up.half()}),
        (r"down is .* a contiguous torch.float32 \(3, 16, 8\)", {"down": layer.down[:2]}),
        (r"weights is .* a contiguous torch.float32 \(2, 1\)", {"routes": replace(routes, weights=x)}),
    ):
        given = {"x": x, "routes": routes, "gate_up": layer.gate_up, "down": layer.down, **change}
        with pytest.raises(ArgumentError, match=f"fused_experts: {message}"):
            fused_experts(**given, gelu=False)
    with pytest.raises(UnsupportedDeviceError, match="use fused_experts"):
        apply_experts(x, routes, [lambda rows: rows] * 3)
