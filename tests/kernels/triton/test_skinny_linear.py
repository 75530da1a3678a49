from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from quire_kernels.dispatch import INTERPRETED
from quire_kernels.errors import ArgumentError
from quire_kernels.skinny_linear import DTYPES, MAX_ROWS, reference, skinny_linear
from quire_kernels.skinny_linear.kernel import cut
from quire_kernels.triton_runtime.config import config_for, launch_config
from quire_kernels.triton_runtime.device import target_of

# The interpreter computes bfloat16 as if its bits were integers, which is silently wrong.
TOLERANCES = {torch.float16: 4e-3} if INTERPRETED else {torch.float16: 4e-3, torch.bfloat16: 2e-2}


def weights(outputs: int, inputs: int, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, Tensor]:
    weight = (torch.randn(outputs, inputs) / inputs**0.5).to(dtype)
    return weight.to(device), torch.randn(outputs).to(dtype).to(device)


@pytest.mark.parametrize("half", TOLERANCES, ids=str)
@pytest.mark.parametrize(("rows", "outputs", "inputs"), [(3, 33, 77), (16, 70, 128), (5, 70, 1000), (1, 64, 1024)])
def test_equals_the_reference_however_often_it_runs(
    rows: int, outputs: int, inputs: int, half: torch.dtype, strided: Callable[..., Tensor], device: torch.device
) -> None:
    weight, bias = weights(outputs, inputs, half, device)
    x = strided(rows, inputs, dtype=half)
    first, tolerance = skinny_linear(x, weight, bias), TOLERANCES[half]
    torch.testing.assert_close(first, reference.skinny_linear(x, weight, bias), rtol=tolerance, atol=tolerance)
    # The counts of arrivals are 0 again, and parts are added in the same order.
    assert torch.equal(skinny_linear(x, weight, bias), first)
    plain = skinny_linear(x[:1], weight)
    torch.testing.assert_close(plain, reference.skinny_linear(x[:1], weight), rtol=tolerance, atol=tolerance)


def test_interpreted_shapes_have_whole_and_split_inputs(device: torch.device) -> None:
    config = config_for("skinny_linear.multiply", target_of(device))
    splits = {cut(inputs, outputs, 8, config)[1] for outputs, inputs in ((70, 128), (70, 1000), (64, 1024))}
    assert min(splits) == 1 and max(splits) > 2


def test_splits_cover_the_inputs_and_fill_the_device() -> None:
    config = launch_config({"BLOCK_N": 64, "BLOCK_K": 128, "PROGRAMS_PER_SM": 3, "num_warps": 4, "num_stages": 3})
    slots = 132 * 3
    sizes = ((6144, 4096), (4096, 4096), (28_672, 4096), (4096, 14_336), (128_256, 4096), (64, 64), (1, 1), (96, 1000))
    for outputs, inputs in sizes:
        tiles, splits, size = cut(inputs, outputs, slots, config)
        assert tiles * 64 >= outputs and size % 128 == 0
        assert (splits - 1) * size < inputs <= splits * size
        assert splits == 1 or tiles * splits <= 2 * slots, "the memory for partial sums"
    # Wide layers fill the device alone; 64 tiles of a narrow one do not.
    assert cut(4096, 128_256, slots, config)[:2] == (2004, 1)
    tiles, splits, _ = cut(14_336, 4096, slots, config)
    assert 0.9 * slots < tiles * splits <= slots


@pytest.mark.parametrize(
    ("x", "weight", "words"),
    [
        (torch.zeros(2, 8), torch.zeros(4, 8), "is torch.float32; bfloat16 or float16"),
        (torch.zeros(MAX_ROWS + 1, 8, dtype=DTYPES[0]), torch.zeros(4, 8, dtype=DTYPES[0]), r"has shape \(17, 8\)"),
        (torch.zeros(2, 8, dtype=DTYPES[0]), torch.zeros(4, 9, dtype=DTYPES[0]), "weight is .*contiguous"),
        (torch.zeros(2, 8, dtype=DTYPES[0]), torch.zeros(8, 4, dtype=DTYPES[0]).t(), "weight is .*contiguous"),
    ],
)
def test_other_operands_are_refused(x: Tensor, weight: Tensor, words: str) -> None:
    with pytest.raises(ArgumentError, match=words):
        skinny_linear(x, weight)


def test_no_rows_and_no_inputs(device: torch.device) -> None:
    weight, bias = weights(33, 64, torch.float16, device)
    x = torch.zeros((2, 64), dtype=torch.float16, device=device)
    assert skinny_linear(x[:0], weight).shape == (0, 33)
    assert torch.equal(skinny_linear(x[:, :0], weight[:, :0].contiguous(), bias), bias.expand(2, 33))
