"""Sampling in plain torch and Python integers: the reference for every implementation."""

import torch
from torch import Tensor

_MASK = 0xFFFFFFFF


def philox4x32(counter: tuple[int, int, int, int], key: tuple[int, int]) -> tuple[int, int, int, int]:
    """Return ten rounds of Philox 4x32 (Salmon et al., Parallel random numbers: as easy as 1, 2, 3, SC 2011)."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(10):
        first, second = c0 * 0xD2511F53, c2 * 0xCD9E8D57
        c0, c1, c2, c3 = (second >> 32) ^ c1 ^ k0, second & _MASK, (first >> 32) ^ c3 ^ k1, first & _MASK
        k0, k1 = (k0 + 0x9E3779B9) & _MASK, (k1 + 0xBB67AE85) & _MASK
    return c0, c1, c2, c3


def uniform(seed: int, position: int, number: int = 0) -> float:
    """Return a number in [0, 1): 53 bits of Philox with key ``seed`` and counter ``position``.

    number  0 for the sampling of a token, 1 for the verification of a drafted token
    """
    words = philox4x32((position & _MASK, position >> 32 & _MASK, 0, 0), (seed & _MASK, seed >> 32 & _MASK))
    first, second = words[2 * number : 2 * number + 2]
    return ((first << 21) ^ (second >> 11)) * 2.0**-53


def greedy(logits: Tensor) -> Tensor:
    return logits.float().argmax(dim=-1)


def keep_mask(
    logits: Tensor, *, temperature: float, top_k: int, top_p: float, min_p: float, typical_p: float = 1.0
) -> Tensor:
    """Return [V] bool: the tokens of one row [V] that may be sampled."""
    weights = (logits.double() / temperature).softmax(dim=-1)
    keep = weights >= min_p * weights.max()
    keep &= weights >= weights.topk(top_k).values[-1]
    if top_p < 1.0:
        ordered = (weights * keep).sort(descending=True).values
        before = ordered.cumsum(dim=-1) - ordered
        keep &= weights >= ordered[before < top_p * ordered.sum()].min()
    if typical_p < 1.0:
        keep &= _typical_mask(weights * keep, typical_p)
    return keep


def _typical_mask(weights: Tensor, typical_p: float) -> Tensor:
    """Return the tokens that typical_p keeps of weights [V], which are 0 for excluded tokens."""
    likely = weights > 0
    shares = weights[likely] / weights.sum()
    information = -shares.log()
    distance = (information - (shares * information).sum()).abs()
    order = distance.argsort(stable=True)
    before = shares[order].cumsum(dim=-1) - shares[order]
    mask = torch.zeros_like(likely)
    mask[likely] = distance <= distance[order][before < typical_p].max()
    return mask


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
    drawn = greedy(logits)
    for i, row in enumerate(logits):
        heat = float(temperature[i])
        if heat == 0.0:
            continue
        keep = keep_mask(
            row,
            temperature=heat,
            top_k=int(top_k[i]),
            top_p=float(top_p[i]),
            min_p=float(min_p[i]),
            typical_p=float(typical_p[i]),
        )
        cumulative = ((row.double() / heat).softmax(dim=-1) * keep).cumsum(dim=-1)
        target = uniform(int(seeds[i]), int(positions[i])) * cumulative[-1]
        drawn[i] = torch.searchsorted(cumulative, target, right=True)
    return drawn
