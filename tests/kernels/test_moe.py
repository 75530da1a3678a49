from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from quire_kernels.errors import ArgumentError
from quire_kernels.moe import Expert, Routes, apply_experts, fused_experts, reference, route_tokens


class Linear:
    """An expert that records the number of rows of each call."""

    def __init__(self, hidden: int, dtype: torch.dtype) -> None:
        self.weight = (torch.randn(hidden, hidden) * hidden**-0.5).to(dtype)
        self.calls: list[int] = []

    def __call__(self, x: Tensor) -> Tensor:
        self.calls.append(x.shape[0])
        return (x.float() @ self.weight.float()).to(x.dtype)


def never(x: Tensor) -> Tensor:
    raise AssertionError("an expert without tokens was called")


@pytest.mark.parametrize(("tokens", "experts", "per_token"), [(1, 8, 2), (7, 5, 5), (33, 128, 8), (3, 1, 1), (0, 4, 2)])
@pytest.mark.parametrize("normalise", [True, False])
def test_routes_equal_the_reference(
    tokens: int,
    experts: int,
    per_token: int,
    normalise: bool,
    dtype: torch.dtype,
    strided: Callable[..., Tensor],
) -> None:
    logits = strided(tokens, experts, dtype=dtype)
    found = route_tokens(logits, per_token, normalise=normalise)
    expected = reference.route_tokens(logits, per_token, normalise)
    assert torch.equal(found.experts, expected.experts)
    torch.testing.assert_close(found.weights, expected.weights)
    if normalise:
        torch.testing.assert_close(found.weights.sum(1), torch.ones(tokens))


@pytest.mark.parametrize(
    ("tokens", "hidden", "experts", "per_token"),
    [(1, 64, 8, 2), (2, 33, 4, 4), (65, 1030, 3, 2), (5, 16, 1, 1)],
)
def test_sums_equal_the_reference(
    tokens: int,
    hidden: int,
    experts: int,
    per_token: int,
    dtype: torch.dtype,
    threads: int,
    assert_close: Callable[[Tensor, Tensor], None],
) -> None:
    x = torch.randn(tokens, hidden).to(dtype)
    routes = route_tokens(torch.randn(tokens, experts), per_token, normalise=True)
    layers = [Linear(hidden, dtype) for _ in range(experts)]
    assert_close(apply_experts(x, routes, layers), reference.apply_experts(x, routes, layers))


def test_each_expert_with_tokens_is_called_once(dtype: torch.dtype) -> None:
    busy = [Linear(24, dtype) for _ in range(3)]
    experts: list[Expert] = [never, busy[0], never, busy[1], busy[2], never]
    chosen = torch.tensor([[4, 1], [1, 4], [4, 3], [1, 4]])
    apply_experts(torch.randn(4, 24).to(dtype), Routes(experts=chosen, weights=torch.rand(4, 2)), experts)
    assert [expert.calls for expert in busy] == [[3], [1], [4]]


def test_sum_of_a_token_does_not_depend_on_its_batch() -> None:
    x = torch.randn(40, 48)
    routes = route_tokens(torch.randn(40, 6), 3, normalise=False)

    def double(rows: Tensor) -> Tensor:
        return rows * 2.0

    together = apply_experts(x, routes, [double] * 6)
    for token in range(40):
        own = slice(token, token + 1)
        alone = apply_experts(x[own], Routes(experts=routes.experts[own], weights=routes.weights[own]), [double] * 6)
        assert torch.equal(alone, together[own])


@pytest.mark.parametrize("gelu", [True, False])
def test_stacked_experts_equal_the_reference(
    gelu: bool, dtype: torch.dtype, assert_close: Callable[[Tensor, Tensor], None]
) -> None:
    x = torch.randn(9, 32).to(dtype)
    gate_up, down = (torch.randn(5, 48, 32) / 6).to(dtype), (torch.randn(5, 32, 24) / 5).to(dtype)
    routes = route_tokens(torch.randn(9, 5), 2, normalise=True)
    found = fused_experts(x, routes, gate_up, down, gelu=gelu)
    assert_close(found, reference.fused_experts(x, routes, gate_up, down, gelu))


def test_zero_tokens_need_no_work() -> None:
    routes = route_tokens(torch.zeros(0, 4), 2, normalise=True)
    assert apply_experts(torch.zeros(0, 8), routes, [never] * 4).shape == (0, 8)


@pytest.mark.parametrize(
    ("logits", "per_token", "message"),
    [
        (torch.zeros(4), 1, r"route_tokens: logits has shape \(4,\); \[tokens, experts\] is needed"),
        (torch.zeros(2, 4).double(), 1, "route_tokens: logits is torch.float64"),
        (torch.zeros(2, 4), 5, "route_tokens: per_token is 5; 1 to 4, the number of experts, is needed"),
        (torch.zeros(2, 4), 0, "route_tokens: per_token is 0"),
    ],
)
def test_invalid_routes_are_refused(logits: Tensor, per_token: int, message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        route_tokens(logits, per_token, normalise=True)


def routes(chosen: Tensor, weights: Tensor | None = None) -> Routes:
    return Routes(experts=chosen, weights=torch.ones(chosen.shape) if weights is None else weights)


@pytest.mark.parametrize(
    ("x", "chosen", "message"),
    [
        (torch.zeros(2, 8), routes(torch.tensor([[0], [3]])), "experts name one from 0 to 3; there are 3"),
        (torch.zeros(2, 8), routes(torch.tensor([[0], [-1]])), "experts name one from -1 to 0; there are 3"),
        (torch.zeros(2, 8), routes(torch.zeros(3, 1, dtype=torch.int64)), r"a contiguous torch.int64 \(2, 1\)"),
        (torch.zeros(2, 8), routes(torch.zeros(2, 1, dtype=torch.int32)), r"a contiguous torch.int64 \(2, 1\)"),
        (torch.zeros(2, 8), routes(torch.zeros(2, dtype=torch.int64)), r"experts has shape \(2,\); \[tokens, K >= 1\]"),
        (torch.zeros(2, 8), routes(torch.zeros(2, 0, dtype=torch.int64)), r"experts has shape \(2, 0\)"),
        (
            torch.zeros(2, 8),
            routes(torch.zeros(2, 1, dtype=torch.int64), torch.zeros(2, 2)),
            r"weights is .* a contiguous torch.float32 \(2, 1\) is needed",
        ),
        (torch.zeros(8, 2).t(), routes(torch.zeros(2, 1, dtype=torch.int64)), "x has strides"),
        (torch.zeros(2, 16)[:, :8], routes(torch.zeros(2, 1, dtype=torch.int64)), r"a contiguous \[tokens, H\]"),
        (torch.zeros(2, 8).double(), routes(torch.zeros(2, 1, dtype=torch.int64)), "x is torch.float64"),
    ],
)
def test_invalid_sums_are_refused(x: Tensor, chosen: Routes, message: str) -> None:
    with pytest.raises(ArgumentError, match=f"apply_experts: .*{message}|apply_experts: {message}"):
        apply_experts(x, chosen, [lambda rows: rows] * 3)


def test_expert_result_of_another_shape_is_refused() -> None:
    with pytest.raises(ArgumentError, match=r"an expert made \(2, 9\) of \(2, 8\)"):
        apply_experts(torch.zeros(2, 8), routes(torch.zeros(2, 1, dtype=torch.int64)), [lambda rows: torch.zeros(2, 9)])
