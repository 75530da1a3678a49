"""Sampling of next tokens from logits.

Legend: B rows, V vocabulary.
"""

import torch
from torch import Tensor

from quire_kernels.checks import check_dense, check_device, check_storage, refuse
from quire_kernels.dispatch import implementation, runs_triton


def greedy(logits: Tensor) -> Tensor:
    """Return the most probable token of each row; the first wins among equals.

    logits   [B, V], rows at any stride
    returns  [B] int64

    Raise ArgumentError on other shapes, strides or dtypes.
    """
    _check_logits("greedy", logits)
    return implementation("sampling", logits.device.type).greedy(logits)


def sample(
    logits: Tensor,
    *,
    temperature: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    min_p: Tensor,
    typical_p: Tensor,
    seeds: Tensor,
    positions: Tensor,
) -> Tensor:
    """Sample a token per row: the inverse of the cumulative distribution at Philox(seed, position).

    The distribution is softmax(logits / temperature) over the tokens that are kept. In this order are kept: tokens at
    least ``min_p`` times as probable as the most probable one; the ``top_k`` most probable; of these, the fewest most
    probable that hold ``top_p`` of the rest; and the fewest tokens that hold ``typical_p`` of the remainder and whose
    information -log p is nearest to its entropy (Meister et al., Locally typical sampling, TACL 2023). Tokens that
    equal the last kept one are kept too, so the result does not depend on the order of equals.

    logits       [B, V] float32 or, for Triton, also 16 bits, rows at any stride
    temperature  [B] float32; 0 selects the most probable token
    top_k        [B] int64, 1 to V (V keeps all); top_p, min_p, typical_p [B] float32: 1, 0 and 1 keep all
    seeds        [B] int64, used as unsigned 64 bits; positions [B] int64, of the sampled tokens in their sequences
    returns      [B] int64

    A row's token depends on its own arguments only. The same seed gives the same token on every device unless rounding
    decides: a CPU adds float64 in the order of tokens, a GPU adds integers of 2^-44 in any order, and their exp differ
    in the last bits. Two devices therefore differ if the random number falls within about 1e-6 of a token's boundary.

    Raise ArgumentError on other shapes, strides or dtypes.
    """
    _check_logits("sample", logits)
    if logits.dtype != torch.float32 and not runs_triton(logits.device.type):
        refuse("sample", "logits", f"are {logits.dtype}; float32 is needed")
    rows = (logits.shape[0],)
    for name, values in (
        ("temperature", temperature),
        ("top_p", top_p),
        ("min_p", min_p),
        ("typical_p", typical_p),
    ):
        check_dense("sample", name, values, torch.float32, rows)
    for name, values in (("top_k", top_k), ("seeds", seeds), ("positions", positions)):
        check_dense("sample", name, values, torch.int64, rows)
    check_device("sample", logits, temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
    check_device("sample", logits, typical_p=typical_p, seeds=seeds, positions=positions)
    ops = implementation("sampling", logits.device.type)
    return ops.sample(logits, temperature, top_k, top_p, min_p, typical_p, seeds, positions)


def _check_logits(op: str, logits: Tensor) -> None:
    check_storage(op, "logits", logits)
    if logits.dim() != 2 or logits.shape[1] == 0:
        refuse(op, "logits", f"have shape {tuple(logits.shape)}; [rows, vocabulary] is needed")
