from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from quire_kernels.linear import linear, reference
from quire_kernels.linear.kernel import cut
from quire_kernels.triton_runtime.config import LaunchConfig, config_for, launch_config
from quire_kernels.triton_runtime.device import device_properties, target_of

# Sums of many products, rounded once but added in another order.
TOLERANCES = {torch.float32: 2e-5, torch.float16: 4e-3, torch.bfloat16: 2e-2}


def weights(outputs: int, inputs: int, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, Tensor]:
    weight = (torch.randn(outputs, inputs) / inputs**0.5).to(dtype)
    return weight.to(device), torch.randn(outputs).to(dtype).to(device)


def config_of(weight: Tensor) -> LaunchConfig:
    return config_for("linear.multiply", target_of(weight.device), f"bits={8 * weight.itemsize}")


@pytest.mark.parametrize(
    ("rows", "outputs", "inputs"),
    [(1, 1, 1), (3, 33, 77), (17, 96, 64), (35, 130, 96), (1, 300, 600), (40, 200, 330)],
)
def test_equals_the_reference(
    rows: int, outputs: int, inputs: int, dtype: torch.dtype, strided: Callable[..., Tensor], device: torch.device
) -> None:
    weight, bias = weights(outputs, inputs, dtype, device)
    x = strided(rows, inputs, dtype=dtype)
    for given in (bias, None):
        found, tolerance = linear(x, weight, given), TOLERANCES[dtype]
        torch.testing.assert_close(found, reference.linear(x, weight, given), rtol=tolerance, atol=tolerance)


def test_splits_follow_from_the_weight_and_cover_it() -> None:
    config = launch_config({"BLOCK_M": 128, "BLOCK_N": 128, "BLOCK_K": 64, "num_warps": 8, "num_stages": 3})
    for outputs, inputs in ((4096, 4096), (4096, 14336), (28672, 4096), (128256, 4096), (6144, 4096), (1, 1), (96, 77)):
        splits, size = cut(inputs, outputs, config)
        assert size % 64 == 0 and (splits - 1) * size < max(inputs, 1) <= splits * size
        assert splits == 1 or (splits * -(-outputs // 128) <= 256 and size >= 256)
    assert cut(4096, 4096, config) == (8, 512)
    assert cut(4096, 28672, config)[0] == 1


@pytest.mark.parametrize(("outputs", "inputs"), [(96, 64), (130, 590)])
def test_row_has_the_same_bits_in_every_batch_and_place(
    outputs: int, inputs: int, dtype: torch.dtype, device: torch.device
) -> None:
    weight, bias = weights(outputs, inputs, dtype, device)
    tile = config_of(weight).blocks["BLOCK_M"]
    x = torch.randn(3 * tile + 5, inputs).to(dtype).to(device)
    together = linear(x, weight, bias)
    for first, count in ((0, 1), (3 * tile + 4, 1), (7, tile), (tile - 1, tile + 1), (11, 2 * tile)):
        assert torch.equal(linear(x[first : first + count], weight, bias), together[first : first + count])
    order = torch.randperm(3 * tile)[: tile + 3].to(device)
    assert torch.equal(linear(x[order], weight, bias), together[order])


def test_parallel_and_sequential_splits_are_bitwise_equal(dtype: torch.dtype, device: torch.device) -> None:
    weight, bias = weights(64, 1024, dtype, device)
    config = config_of(weight)
    assert cut(1024, 64, config)[0] > 1
    # As many tiles as multiprocessors, so no split needs a separate program.
    tile, tiles = config.blocks["BLOCK_M"], device_properties(weight.device).multiprocessors
    x = torch.randn(tiles * tile, 1024).to(dtype).to(device)
    in_turn = linear(x, weight, bias)
    assert torch.equal(linear(x[:tile], weight, bias), in_turn[:tile])
    assert torch.equal(linear(x[5:6], weight, bias), in_turn[5:6])


def test_rows_outside_the_matrix_are_not_accessed(device: torch.device) -> None:
    weight, _ = weights(33, 64, torch.float32, device)
    x = torch.full((9, 64), torch.nan, device=device)
    x[4] = 1.0
    found = linear(x, weight)
    assert bool(found[4].isfinite().all()) and bool(found[[0, 3, 5, 8]].isnan().all())
    assert linear(x[:0], weight).shape == (0, 33)
