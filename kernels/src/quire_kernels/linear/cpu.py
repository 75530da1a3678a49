"""linear on a CPU: torch's own, over batches that are always of one size.

torch's libraries choose a kernel by the shape of the product and the alignment of its operands. Both are held fixed:
the rows go in chunks of 16, the last filled up with zeros, each beginning where a cache line does. Within a chunk a row
has the same bits at every place; the tests hold the libraries to that.
"""

import torch
from torch import Tensor
from torch.nn import functional

CHUNK = 16
"""Rows of a product. Fewer would read the weights more often, more would be wasted on small batches."""

_CACHE_LINE = 64


def linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    rows, inputs = x.shape
    if not rows:
        return x.new_empty((0, weight.shape[0]))
    chunks = -(-rows // CHUNK)
    if rows == chunks * CHUNK and _well_placed(x):
        filled = x
    else:
        filled = x.new_zeros((chunks * CHUNK, inputs))
        filled[:rows] = x
    parts = [functional.linear(chunk, weight, bias) for chunk in filled.split(CHUNK)]
    return (parts[0] if chunks == 1 else torch.cat(parts))[:rows]


def _well_placed(x: Tensor) -> bool:
    """Every chunk of ``x`` is dense and begins where a cache line does."""
    return x.is_contiguous() and x.data_ptr() % _CACHE_LINE == 0 and CHUNK * x.stride(0) * x.itemsize % _CACHE_LINE == 0
