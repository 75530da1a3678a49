"""Drawing next tokens from logits.

Legend: B rows, V vocabulary.
"""

import torch
from torch import Tensor

from quire_kernels.checks import check_dense, check_device, check_storage, refuse
from quire_kernels.dispatch import implementation


def greedy(logits: Tensor) -> Tensor:
    """The likeliest token of each row, the first of equals.

    logits   [B, V], rows at any stride
    returns  [B] int64
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
    """Draws a token per row: the inverse of the cumulative distribution at Philox(seed, position).

    The distribution is softmax(logits / temperature), of which are kept, in this order: tokens at least ``min_p`` times
    as likely as the likeliest; the ``top_k`` likeliest; the fewest likeliest of these that hold ``top_p`` of the rest;
    the fewest whose information -log p is nearest to the entropy of what is left that hold ``typical_p`` of it (Meister
    et al., Locally typical sampling, TACL 2023). Tokens that stand where the last one kept stands are kept too, so what
    is drawn does not depend on the order of equals.

    logits       [B, V] float32, rows at any stride
    temperature  [B] float32; 0 takes the likeliest token
    top_k        [B] int64, 1 to V (V keeps all); top_p, min_p, typical_p [B] float32: 1, 0 and 1 keep all
    seeds        [B] int64, used as 64 bits without sign; positions [B] int64, of the drawn tokens in their sequences
    returns      [B] int64

    A row's token depends on its own arguments only. The same seed draws the same token on every device, but where
    rounding decides: a CPU adds float64 in the order of tokens, a GPU whole numbers of 2^-44 in any order, and their
    exp differ in the last bits; so two devices part where the draw falls within some 1e-6 of a token's edge.

    Raises ArgumentError on other shapes, strides or dtypes.
    """
    _check_logits("sample", logits)
    if logits.dtype != torch.float32:
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
