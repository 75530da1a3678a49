"""The sum of the tensors of all ranks, in float32 in the order of the ranks, rounded once."""

from collections.abc import Sequence

import torch
from torch import Tensor


def all_reduce(tensors: Sequence[Tensor]) -> Tensor:
    """Return the sum of ``tensors``, one per rank, in their dtype."""
    total = torch.zeros_like(tensors[0], dtype=torch.float32)
    for tensor in tensors:
        total += tensor.float()
    return total.to(tensors[0].dtype)
