"""Log-probabilities of given tokens and of the most probable tokens.

Legend: R rows of logits, K of them to report, V vocabulary, M most probable tokens.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from quire_kernels.checks import check_dense, check_device, check_storage, refuse
from quire_kernels.dispatch import implementation


@dataclass(frozen=True, slots=True, kw_only=True)
class Logprobs:
    """Natural logarithms of softmax(logits)."""

    of_token: Tensor  # [K] float32
    rank: Tensor  # [K] int64: 1 + the number of more probable tokens
    token_ids: Tensor  # [K, M] int64: the most probable, descending; the lower id first among equals
    logprobs: Tensor  # [K, M] float32


def token_logprobs(logits: Tensor, lines: Tensor, token_ids: Tensor, most: int) -> Logprobs:
    """Return the logprob and rank of each given token, and the ``most`` most probable tokens of its row.

    logits     [R, V], rows at any stride
    lines      [K] int64, the rows of logits
    token_ids  [K] int64, one token per line
    most       M, 0 to V

    The computation is in float32, sums are in float64; no memory of the size of the vocabulary is allocated. Raise
    ArgumentError on other shapes, strides or dtypes.
    """
    check_storage("token_logprobs", "logits", logits)
    if logits.dim() != 2:
        refuse("token_logprobs", "logits", f"have shape {tuple(logits.shape)}; [rows, vocabulary] is needed")
    if not 0 <= most <= logits.shape[1]:
        refuse("token_logprobs", "most", f"is {most}; 0 to {logits.shape[1]} is needed")
    check_dense("token_logprobs", "lines", lines, torch.int64, (token_ids.shape[0],))
    check_dense("token_logprobs", "token_ids", token_ids, torch.int64, (lines.shape[0],))
    check_device("token_logprobs", logits, lines=lines, token_ids=token_ids)
    return implementation("logprobs", logits.device.type).token_logprobs(logits, lines, token_ids, most)
