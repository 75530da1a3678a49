"""Checking what a draft guessed against what the model says: rejection sampling for speculative decoding.

Leviathan et al., Fast inference from transformers via speculative decoding, arXiv 2211.17192; Chen et al., arXiv
2302.01318. What comes out is distributed as what the model alone would have drawn, however bad the draft is.

Legend: B sequences, R rows of logits, V vocabulary.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from quire_kernels.checks import check_dense, check_device, check_storage, refuse
from quire_kernels.dispatch import implementation


@dataclass(frozen=True, slots=True, kw_only=True)
class Verified:
    """The first ``num_tokens[b]`` of a sequence's rows hold its next tokens; what the others hold is undefined."""

    token_ids: Tensor  # [R] int64: drafts that were accepted, then one that the model drew
    num_tokens: Tensor  # [B] int64: from 1 to the sequence's rows; 0 where it has none


def verify_drafts(
    logits: Tensor,
    drafts: Tensor,
    starts: Tensor,
    draft_probs: Tensor | None,
    *,
    temperature: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    min_p: Tensor,
    typical_p: Tensor,
    seeds: Tensor,
    positions: Tensor,
) -> Verified:
    """A draft d of row r is accepted with probability min(1, p(d) / q(d)), p being the distribution ``sample`` draws
    from and q the draft's; the first that is not is replaced by a draw from max(p - q, 0), and those after it are void.
    Where all are accepted, the last row gives one more token.

    Without ``draft_probs``, as for tokens found by n-gram search or drafted greedily, q(d) is 1: each row draws from p,
    and a draft is accepted if it is what was drawn. That is the same rule, and gives token for token what would have
    been drawn without drafts. A row of temperature 0 accepts the likeliest token.

    logits       [R, V] float32, rows at any stride: those of sequence b are starts[b] to starts[b + 1] - 1, one more
                 than it has drafts
    drafts       [R] int64: what is guessed to follow row r; of a sequence's last row not read
    starts       [B + 1] int64, rising from 0 to R at most
    draft_probs  [R, V] float32, rows at any stride: what each draft was drawn from; of last rows not read
    temperature  and what follows: [R] each, as for ``sample``. A sequence without drafts draws what ``sample`` draws;
                 whether to accept is decided by other bits of the same Philox(seed, position)

    Raises ArgumentError on other shapes, strides or dtypes.
    """
    op = "verify_drafts"
    for name, values in (("logits", logits), ("draft_probs", draft_probs)):
        if values is None:
            continue
        check_storage(op, name, values)
        if values.dim() != 2 or values.dtype != torch.float32 or values.shape[1] == 0 or values.shape != logits.shape:
            found = f"{values.dtype} {tuple(values.shape)}"
            refuse(op, name, f"are {found}; float32 {tuple(logits.shape)} or other [rows, vocabulary] is needed")
    rows = (logits.shape[0],)
    if starts.dim() != 1 or starts.shape[0] == 0:
        refuse(op, "starts", f"has shape {tuple(starts.shape)}; [sequences + 1] is needed")
    check_dense(op, "starts", starts, torch.int64, tuple(starts.shape))
    reals = {"temperature": temperature, "top_p": top_p, "min_p": min_p, "typical_p": typical_p}
    for name, values in reals.items():
        check_dense(op, name, values, torch.float32, rows)
    integers = {"drafts": drafts, "top_k": top_k, "seeds": seeds, "positions": positions}
    for name, values in integers.items():
        check_dense(op, name, values, torch.int64, rows)
    check_device(op, logits, starts=starts, draft_probs=draft_probs, **reals, **integers)
    ops = implementation("rejection", logits.device.type)
    return ops.verify_drafts(
        logits, drafts, starts, draft_probs, temperature, top_k, top_p, min_p, typical_p, seeds, positions
    )
