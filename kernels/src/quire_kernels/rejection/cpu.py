"""Rejection sampling on a CPU: one launch of the sampler, and a comparison.

Drafts with probabilities of their own, which a second model makes, are checked row by row as the reference does it.
"""

import torch
from torch import Tensor

from quire_kernels.rejection import Verified, reference
from quire_kernels.sampling.cpu import sample


def verify_drafts(
    logits: Tensor,
    drafts: Tensor,
    starts: Tensor,
    draft_probs: Tensor | None,
    temperature: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    min_p: Tensor,
    typical_p: Tensor,
    seeds: Tensor,
    positions: Tensor,
) -> Verified:
    columns = (temperature, top_k, top_p, min_p, typical_p, seeds, positions)
    if draft_probs is not None:
        return reference.verify_drafts(logits, drafts, starts, draft_probs, *columns)
    tokens = sample(logits, *columns)
    rows = starts[1:] - starts[:-1]  # [B]
    wrong = (tokens != drafts).nonzero()[:, 0]
    # A row after all others stands for sequences in which nothing is wrong.
    first_wrong = torch.cat((wrong, starts[-1:]))[torch.searchsorted(wrong, starts[:-1])]  # [B]
    return Verified(token_ids=tokens, num_tokens=torch.minimum(first_wrong - starts[:-1] + 1, rows))
