import functools
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from quire_kernels.errors import ArgumentError, UnsupportedDeviceError
from quire_kernels.packed_linear import (
    BFloat16Weights,
    bfloat16_linear,
    float_linear,
    int8_linear,
    pack_bfloat16,
    pack_float,
    pack_int8,
    quantise_weight,
    reference,
    supports_bfloat16,
)

# Outputs and inputs: whole panels and units, a part of one, more panels than threads share, a single number.
SHAPES = [(1, 2), (33, 78), (96, 66), (576, 1536), (1000, 200)]
# Every number of rows with a shape that suits it, and every shape with one row and with many.
SIZES = [
    *((rows, outputs, inputs) for outputs, inputs in SHAPES for rows in (1, 97)),
    *((rows, 33, 78) for rows in (3, 12, 13, 25, 200)),
]
needs_pairs = pytest.mark.skipif(not supports_bfloat16(), reason="this CPU does not multiply pairs of bfloat16")


def weights(outputs: int, inputs: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    return (torch.randn(outputs, inputs) / inputs**0.5).to(dtype), torch.randn(outputs).to(dtype)


@pytest.mark.parametrize(("rows", "outputs", "inputs"), SIZES)
def test_int8_equals_the_reference(
    rows: int, outputs: int, inputs: int, dtype: torch.dtype, strided: Callable[..., Tensor]
) -> None:
    weight, bias = weights(outputs, inputs, dtype)
    x = strided(rows, inputs, dtype=dtype)
    for given in (bias, None):
        found, expected = int8_linear(x, pack_int8(weight, given)), reference.int8_linear(x, weight, given)
        assert found.is_contiguous() and found.dtype == dtype
        # Integers are equal; the rest is rounding to the dtype, and values between two levels.
        torch.testing.assert_close(found.float(), expected.float(), rtol=1e-2, atol=2e-2)
        assert (found.float() - expected.float()).abs().mean() < 2e-3


def test_int8_is_close_to_the_float_layer() -> None:
    weight, bias = weights(300, 512, torch.float32)
    x = torch.randn(40, 512)
    x[3] *= 1000.0  # each row has its own scale
    exact = torch.nn.functional.linear(x, weight, bias)
    errors = int8_linear(x, pack_int8(weight, bias)) - exact
    assert (errors.std(dim=1) / exact.std(dim=1)).max() < 0.02


@pytest.mark.parametrize(("outputs", "inputs"), SHAPES)
def test_row_has_the_same_bits_in_every_batch_and_place(
    outputs: int, inputs: int, threads: int, strided: Callable[..., Tensor]
) -> None:
    weight, bias = weights(outputs, inputs, torch.bfloat16)
    x = torch.randn(131, inputs).to(torch.bfloat16)
    apart = strided(131, inputs, dtype=torch.bfloat16, gap=4)
    apart.copy_(x)
    packed = pack_int8(weight, bias)
    layers: list[Callable[[Tensor], Tensor]] = [lambda rows: int8_linear(rows, packed)]
    for halves in (False, True):
        floats = pack_float(weight.float(), bias.float(), halves=halves)
        layers.append(functools.partial(lambda rows, floats: float_linear(rows.float(), floats), floats=floats))
    if supports_bfloat16():
        pairs = pack_bfloat16(weight, bias)
        layers.append(lambda rows: bfloat16_linear(rows, pairs))
    for layer in layers:
        together = layer(x)
        for count in (1, 2, 12, 13, 100):
            for first in (0, 31):
                assert torch.equal(layer(x[first : first + count]), together[first : first + count])
        order = torch.randperm(131)
        assert torch.equal(layer(x[order]), together[order])
        assert torch.equal(layer(apart), together)


@needs_pairs
@pytest.mark.parametrize(("rows", "outputs", "inputs"), SIZES)
def test_bfloat16_equals_the_reference(rows: int, outputs: int, inputs: int, strided: Callable[..., Tensor]) -> None:
    weight, bias = weights(outputs, inputs, torch.bfloat16)
    x = strided(rows, inputs, dtype=torch.bfloat16, gap=4)
    for given in (bias, None):
        found, expected = bfloat16_linear(x, pack_bfloat16(weight, given)), reference.bfloat16_linear(x, weight, given)
        torch.testing.assert_close(found, expected, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize(("rows", "outputs", "inputs"), SIZES)
@pytest.mark.parametrize("halves", [False, True])
def test_float_equals_the_reference(
    halves: bool, rows: int, outputs: int, inputs: int, strided: Callable[..., Tensor]
) -> None:
    weight, bias = weights(outputs, inputs, torch.float32)
    x = strided(rows, inputs, dtype=torch.float32)
    for given in (bias, None):
        found = float_linear(x, pack_float(weight, given, halves=halves))
        expected = reference.float_linear(x, weight.half().float() if halves else weight, given)
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


def test_quantization_levels_cover_both_ends_of_a_row() -> None:
    """If the minimum and the maximum are both rounded up, there are still at most 256 levels."""
    x = torch.tensor([[-0.5, 254.5], [-2.0, -1.0], [1.0, 3.0], [0.0, 0.0]])
    weight = torch.eye(2)
    expected = torch.tensor([[0.0, 254.5], [-2.0, -1.0], [1.0, 3.0], [0.0, 0.0]])
    torch.testing.assert_close(int8_linear(x, pack_int8(weight)), expected, rtol=0.0, atol=0.6)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_a_row_that_is_not_finite_gives_no_finite_results(bad: float) -> None:
    x = torch.randn(3, 64)
    x[1, 40] = bad
    found = int8_linear(x, pack_int8(torch.randn(32, 64)))
    assert not found[1].isfinite().any() and found[[0, 2]].isfinite().all()


def test_an_output_without_weights_is_its_bias() -> None:
    weight, bias = torch.randn(40, 16), torch.randn(40)
    weight[7] = 0.0
    quantised, scales = quantise_weight(weight)
    assert scales[7] == 1.0 and not quantised[7].any()
    assert torch.equal(int8_linear(torch.randn(2, 16), pack_int8(weight, bias))[:, 7], bias[7].expand(2))


def test_zero_rows_give_an_empty_result() -> None:
    assert int8_linear(torch.zeros(0, 8), pack_int8(torch.zeros(5, 8))).shape == (0, 5)


def test_int8_sums_are_exact_up_to_the_largest_allowed_size() -> None:
    x, weight = torch.ones(1, 65_536), torch.ones(1, 65_536)
    assert int8_linear(x, pack_int8(weight)).item() == pytest.approx(65_536, rel=1e-6)
    with pytest.raises(ArgumentError, match="pack_int8: weight has 65537 inputs; at most 65536"):
        pack_int8(torch.ones(1, 65_537))


@pytest.mark.parametrize(
    ("x", "message"),
    [
        (torch.zeros(2, 8).int(), "int8_linear: x is torch.int32"),
        (torch.zeros(2, 7), r"int8_linear: x is \(2, 7\) with strides \(7, 1\); dense rows of 8 inputs are needed"),
        (torch.zeros(8, 2).t(), "int8_linear: x has strides"),
        (torch.zeros(8), r"int8_linear: x is \(8,\)"),
    ],
)
def test_invalid_operands_are_refused(x: Tensor, message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        int8_linear(x, pack_int8(torch.zeros(5, 8)))


def test_invalid_weights_are_not_packed() -> None:
    with pytest.raises(ArgumentError, match=r"pack_int8: weight has shape \(8,\)"):
        pack_int8(torch.zeros(8))
    with pytest.raises(ArgumentError, match=r"pack_int8: bias is .*; a contiguous torch.float32 \(5,\) is needed"):
        pack_int8(torch.zeros(5, 8), torch.zeros(8))
    with pytest.raises(ArgumentError, match="pack_float: weight is torch.bfloat16"):
        pack_float(torch.zeros(5, 8, dtype=torch.bfloat16))
    with pytest.raises(ArgumentError, match="float_linear: x is torch.bfloat16"):
        float_linear(torch.zeros(2, 8, dtype=torch.bfloat16), pack_float(torch.zeros(5, 8)))
    with pytest.raises(ArgumentError, match="pack_bfloat16: weight is torch.float32 with 8 inputs"):
        pack_bfloat16(torch.zeros(5, 8))
    with pytest.raises(ArgumentError, match="pack_bfloat16: weight is torch.bfloat16 with 7 inputs"):
        pack_bfloat16(torch.zeros(5, 7, dtype=torch.bfloat16))


def test_only_a_cpu_multiplies_packed_weights() -> None:
    with pytest.raises(UnsupportedDeviceError, match="no path for meta devices"):
        int8_linear(torch.zeros(2, 8, device="meta"), pack_int8(torch.zeros(5, 8)))


@needs_pairs
def test_rows_not_aligned_to_pairs_are_refused() -> None:
    packed: BFloat16Weights = pack_bfloat16(torch.zeros(5, 8, dtype=torch.bfloat16))
    with pytest.raises(ArgumentError, match="bfloat16_linear: x is torch.bfloat16, rows 9 apart"):
        bfloat16_linear(torch.zeros(3, 9, dtype=torch.bfloat16)[:, :8], packed)
