"""linear on a CPU: torch's own product on batches of one fixed size.

torch's libraries select a kernel by the shape of the product and the alignment of its operands. Both are fixed here:
the rows are processed in chunks of 16, the last one padded with zeros, each aligned to a cache line. Within a chunk a
row has the same bits at every position; the tests check that the libraries guarantee it.
"""

import torch
from torch import Tensor
from torch.nn import functional

CHUNK = 16
"""Rows per product. Fewer would read the weights more often, more would be wasted on small batches."""

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
    """Return whether every chunk of ``x`` is dense and aligned to a cache line."""
    return x.is_contiguous() and x.data_ptr() % _CACHE_LINE == 0 and CHUNK * x.stride(0) * x.itemsize % _CACHE_LINE == 0
