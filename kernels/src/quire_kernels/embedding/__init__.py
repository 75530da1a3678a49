"""The first layer of a model: a row of a table for each token.

Legend: T tokens, V vocabulary, H hidden size.
"""

import torch
from torch import Tensor

from quire_kernels.checks import check_dense, check_device, check_storage, refuse
from quire_kernels.dispatch import implementation, runs_triton


def embed(token_ids: Tensor, table: Tensor, scale: float | None = None, *, out: Tensor | None = None) -> Tensor:
    """Return the rows of ``table`` of some tokens, multiplied by ``scale`` and rounded to their dtype.

    token_ids  [T] int64, 0 to V - 1
    table      [V, H], rows at any stride
    out        [T, H], contiguous, dtype of the table; new if None
    returns    ``out``

    Raise ArgumentError on other shapes, strides or dtypes, and on a CPU for a token outside the table.
    """
    check_storage("embed", "table", table)
    if table.dim() != 2:
        refuse("embed", "table", f"has shape {tuple(table.shape)}; [vocabulary, hidden size] is needed")
    check_dense("embed", "token_ids", token_ids, torch.int64, (token_ids.numel(),))
    check_device("embed", table, token_ids=token_ids, out=out)
    if out is not None:
        check_dense("embed", "out", out, table.dtype, (token_ids.shape[0], table.shape[1]))
    if not runs_triton(table.device.type):
        return implementation("embedding", table.device.type).embed(token_ids, table, scale, out)
    rows = torch.index_select(table, 0, token_ids, out=out)  # torch's own kernel is as fast as memory
    return rows if scale is None else rows.mul_(scale)
