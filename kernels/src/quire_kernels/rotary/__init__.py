"""Rotary position embedding, in place.

Legend: T tokens, H heads, D head dim, P positions in the table, R rotated components (R <= D).
"""

import torch
from torch import Tensor

from quire_kernels.checks import check_dense, check_device, check_storage, refuse
from quire_kernels.dispatch import implementation


def rotary(x: Tensor, cos_sin: Tensor, positions: Tensor) -> None:
    """Rotate the first R components of every head in place by its token's position (RoFormer, arXiv 2104.09864).

    Component i is paired with i + R/2, as in the Llama checkpoints of Hugging Face: (x[i], x[i + R/2]) becomes (x[i]
    cos - x[i + R/2] sin, x[i + R/2] cos + x[i] sin).

    x          [T, H, D], changed in place; a token's heads are dense, tokens at any stride
    cos_sin    [P, R] float32: R/2 cosines, then R/2 sines, of each position
    positions  [T] int64, each below P

    Raise ArgumentError on other shapes, strides, dtypes, devices, or a position outside the table (on a GPU: in the
    debug build, ``triton_runtime.debug``).
    """
    check_heads("rotary", "x", x)
    check_tables("rotary", cos_sin, positions, x)
    check_device("rotary", x, cos_sin=cos_sin, positions=positions)
    implementation("rotary", x.device.type).rotary(x, cos_sin, positions)


def rotary_table(inverse_frequencies: Tensor, positions: int, attention_factor: float = 1.0) -> Tensor:
    """Return the [P, R] table of cosines and sines for ``rotary``, from R/2 inverse frequencies.

    Angles are computed in float64: float32 positions times float32 frequencies lose digits in long contexts.
    """
    angles = torch.outer(torch.arange(positions, dtype=torch.float64), inverse_frequencies.double())  # [P, R/2]
    return (torch.cat((angles.cos(), angles.sin()), dim=1) * attention_factor).float()


def check_heads(op: str, argument: str, x: Tensor) -> None:
    check_storage(op, argument, x)
    if x.dim() != 3:
        refuse(op, argument, f"has shape {tuple(x.shape)}; [tokens, heads, head dim] is needed")
    if x.stride(1) != x.shape[2] and x.shape[1] != 1:
        refuse(op, argument, f"has strides {tuple(x.stride())}; the heads of a token must lie side by side")


def check_tables(op: str, cos_sin: Tensor, positions: Tensor, x: Tensor) -> None:
    width = cos_sin.shape[-1]
    check_dense(op, "cos_sin", cos_sin, torch.float32, (cos_sin.shape[0], width))
    if width % 2 or width > x.shape[2]:
        refuse(op, "cos_sin", f"is {width} wide; an even number up to the head dim {x.shape[2]} is needed")
    check_dense(op, "positions", positions, torch.int64, (x.shape[0],))
