"""Rejection sampling in plain torch, a row at a time: what every implementation is compared with."""

import torch
from torch import Tensor

from quire_kernels.rejection import Verified
from quire_kernels.sampling import reference


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
    tokens = reference.sample(
        logits,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        min_p=min_p,
        typical_p=typical_p,
        seeds=seeds,
        positions=positions,
    )
    counts = torch.zeros(len(starts) - 1, dtype=torch.int64)
    bounds = starts.tolist()
    for sequence, (begin, end) in enumerate(zip(bounds, bounds[1:], strict=False)):
        for row in range(begin, end):
            counts[sequence] += 1
            draft, heat = int(drafts[row]), float(temperature[row])
            if row == end - 1:
                break
            if draft_probs is None or heat == 0.0:
                if tokens[row] != draft:
                    break
                continue
            keep = reference.keep_mask(
                logits[row],
                temperature=heat,
                top_k=int(top_k[row]),
                top_p=float(top_p[row]),
                min_p=float(min_p[row]),
                typical_p=float(typical_p[row]),
            )
            weights = (logits[row].double() / heat).softmax(dim=-1) * keep
            model, guess = weights / weights.sum(), draft_probs[row].double()
            seed, position = int(seeds[row]), int(positions[row])
            if reference.uniform(seed, position, 1) * guess[draft] < model[draft]:
                tokens[row] = draft
                continue
            cumulative = (model - guess).clamp(min=0.0).cumsum(dim=-1)
            # Nothing is left where the two are one and the same but for rounding: the model's own draw stands then.
            if cumulative[-1] > 0.0:
                target = reference.uniform(seed, position) * cumulative[-1]
                tokens[row] = torch.searchsorted(cumulative, target, right=True)
            break
    return Verified(token_ids=tokens, num_tokens=counts)
