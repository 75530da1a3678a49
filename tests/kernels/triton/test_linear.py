"""The splits of a product's inputs in Triton."""

import torch

from quire_kernels.linear import linear
from quire_kernels.linear.kernel import cut
from quire_kernels.triton_runtime.config import config_for, launch_config
from quire_kernels.triton_runtime.device import device_properties, target_of


def test_splits_follow_from_the_weight_and_cover_it() -> None:
    config = launch_config({"BLOCK_M": 128, "BLOCK_N": 128, "BLOCK_K": 64, "num_warps": 8, "num_stages": 3})
    for outputs, inputs in ((4096, 4096), (4096, 14336), (28672, 4096), (128256, 4096), (6144, 4096), (1, 1), (96, 77)):
        splits, size = cut(inputs, outputs, config)
        assert size % 64 == 0 and (splits - 1) * size < max(inputs, 1) <= splits * size
        assert splits == 1 or (splits * -(-outputs // 128) <= 256 and size >= 256)
    assert cut(4096, 4096, config) == (8, 512)
    assert cut(4096, 28672, config)[0] == 1


def test_parallel_and_sequential_splits_are_bitwise_equal(dtype: torch.dtype, device: torch.device) -> None:
    weight = (torch.randn(64, 1024) / 32).to(dtype).to(device)
    bias = torch.randn(64).to(dtype).to(device)
    config = config_for("linear.multiply", target_of(device), f"bits={8 * weight.itemsize}")
    assert cut(1024, 64, config)[0] > 1
    # As many tiles as multiprocessors, so no split needs a separate program.
    tile, tiles = config.blocks["BLOCK_M"], device_properties(weight.device).multiprocessors
    x = torch.randn(tiles * tile, 1024).to(dtype).to(device)
    in_turn = linear(x, weight, bias)
    assert torch.equal(linear(x[:tile], weight, bias), in_turn[:tile])
    assert torch.equal(linear(x[5:6], weight, bias), in_turn[5:6])
