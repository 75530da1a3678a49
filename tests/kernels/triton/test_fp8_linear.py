"""Float8 layers: quantized rows have the reference's bits, from any op, and products are close to it."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from quire_kernels.activation import gelu_tanh_and_mul, gelu_tanh_and_mul_fp8, silu_and_mul, silu_and_mul_fp8
from quire_kernels.errors import ArgumentError
from quire_kernels.fp8 import Fp8Rows
from quire_kernels.fp8 import quantise_rows as expected_rows
from quire_kernels.fp8_linear import fp8_linear, quantise_rows, quantise_weight, reference
from quire_kernels.rms_norm import rms_norm, rms_norm_fp8

Strided = Callable[..., Tensor]


def assert_equal(found: Fp8Rows, expected: Fp8Rows) -> None:
    assert torch.equal(found.scales, expected.scales)
    differ = (found.values.view(torch.uint8) != expected.values.view(torch.uint8)).nonzero().tolist()
    assert not differ, [(place, found.values[*place].item(), expected.values[*place].item()) for place in differ[:5]]


# 8,224 inputs are more than one block of the kernel.
@pytest.mark.parametrize(("rows", "width"), [(1, 1), (7, 33), (3, 576), (2, 8224)])
def test_rows_have_the_bits_of_the_reference(rows: int, width: int, dtype: torch.dtype, strided: Strided) -> None:
    x = strided(rows, width, dtype=dtype)
    # Each row of another magnitude, down to numbers that float8 rounds to its subnormal ones and to 0.
    x *= torch.logspace(-3, 2, rows, device=x.device)[:, None].to(dtype)
    x[0, : width // 2] *= 1e-3
    assert_equal(quantise_rows(x), expected_rows(x))


def test_rows_of_zeros_and_of_tiny_numbers_stay_finite(device: torch.device) -> None:
    x = torch.zeros(3, 32, device=device)
    x[1, 3], x[2, 5] = 1e-38, -3e-31
    rows = quantise_rows(x)
    assert_equal(rows, expected_rows(x))
    assert bool(rows.dequantised().isfinite().all()) and not bool(rows.values[0].float().any())


# NumPy, which the interpreter uses, warns of infinity times 0.
@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")
@pytest.mark.parametrize("wrong", [float("nan"), float("inf"), -float("inf")])
def test_a_row_with_nan_or_infinity_gives_nan_and_no_other_row(wrong: float, device: torch.device) -> None:
    x = torch.randn(3, 32, device=device)
    x[1, 7] = wrong
    y = fp8_linear(x, quantise_weight(torch.randn(16, 32, device=device)))
    assert bool(y[1].isnan().all()) and bool(y[[0, 2]].isfinite().all())


@pytest.mark.parametrize("adds", [False, True])
@pytest.mark.parametrize(("rows", "width"), [(5, 80), (3, 576), (2, 4096)])
def test_a_norm_to_float8_has_the_bits_of_two_ops(
    rows: int, width: int, adds: bool, dtype: torch.dtype, strided: Strided, device: torch.device
) -> None:
    x, weight = strided(rows, width, dtype=dtype), torch.randn(width).to(dtype).to(device)
    first = torch.randn(rows, width, device=device).to(dtype) if adds else None
    second = None if first is None else first.clone()
    found = rms_norm_fp8(x, weight, 1e-5, first)
    assert_equal(found, expected_rows(rms_norm(x, weight, 1e-5, second)))
    if first is not None and second is not None:
        assert torch.equal(first, second)


@pytest.mark.parametrize(
    ("fused", "plain"), [(silu_and_mul_fp8, silu_and_mul), (gelu_tanh_and_mul_fp8, gelu_tanh_and_mul)]
)
@pytest.mark.parametrize("width", [33, 1536, (1 << 15) + 16])
def test_an_activation_to_float8_has_the_bits_of_two_ops(
    fused: Callable[[Tensor], Fp8Rows],
    plain: Callable[[Tensor], Tensor],
    width: int,
    dtype: torch.dtype,
    strided: Strided,
) -> None:
    gate_up = strided(2, 2 * width, dtype=dtype)
    assert_equal(fused(gate_up), expected_rows(plain(gate_up)))


@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize(("rows", "inputs", "outputs"), [(1, 16, 16), (5, 576, 48), (33, 64, 4112)])
def test_products_equal_the_reference_but_for_the_last_rounding(
    rows: int, inputs: int, outputs: int, biased: bool, dtype: torch.dtype, device: torch.device
) -> None:
    x, weight = (torch.randn(*shape, device=device).to(dtype) for shape in ((rows, inputs), (outputs, inputs)))
    weight *= torch.logspace(-2, 1, outputs, device=device)[:, None].to(dtype)
    bias = torch.randn(outputs, device=device).to(dtype) if biased else None
    found, expected = fp8_linear(x, quantise_weight(weight, bias)), reference.fp8_linear(x, weight, bias)
    assert found.dtype == dtype and found.shape == (rows, outputs)
    error = (found.float() - expected.float()).norm() / expected.float().norm()
    assert float(error) < 4e-3  # bfloat16 rounds by up to 2 ** -9
    exact = x.float() @ weight.float().t() + (0.0 if bias is None else bias.float())
    assert float((found.float() - exact).norm() / exact.norm()) < 0.06


def test_quantised_rows_and_their_tensor_give_the_same_product(device: torch.device) -> None:
    x, weights = torch.randn(3, 64, device=device), quantise_weight(torch.randn(32, 64, device=device))
    assert torch.equal(fp8_linear(x, weights), fp8_linear(quantise_rows(x), weights))


def test_no_rows_are_no_rows(device: torch.device) -> None:
    weights = quantise_weight(torch.randn(32, 64, device=device))
    assert fp8_linear(torch.zeros(0, 64, device=device), weights).shape == (0, 32)
    assert silu_and_mul_fp8(torch.zeros(0, 64, device=device)).values.shape == (0, 32)
    assert rms_norm_fp8(torch.zeros(0, 64, device=device), torch.ones(64, device=device), 1e-5).scales.shape == (0, 1)


def test_wrong_sizes_are_refused(device: torch.device) -> None:
    with pytest.raises(ArgumentError, match=r"fp8_linear: weight has shape \(24, 64\); multiples of 16 are needed"):
        quantise_weight(torch.zeros(24, 64, device=device))
    with pytest.raises(ArgumentError, match="rows of 64 inputs are needed"):
        fp8_linear(torch.zeros(2, 32, device=device), quantise_weight(torch.zeros(16, 64, device=device)))
