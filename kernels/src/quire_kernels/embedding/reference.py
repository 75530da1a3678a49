"""Embeddings in plain torch: the reference for every implementation."""

from torch import Tensor


def embed(token_ids: Tensor, table: Tensor, scale: float | None = None) -> Tensor:
    rows = table[token_ids]
    return rows if scale is None else (rows.float() * scale).to(table.dtype)
