"""Token masks over the vocabulary, which apply between the forward pass and the sampling.

Legend: R rows of logits, V vocabulary, M masked rows.
"""

import numpy as np
import torch
from torch import Tensor

from quire_engine.core.batch import TokenMasks, mask_bytes

_FEW = 16
"""A row with less than one allowed token in so many is filled, and gets its allowed logits back."""


def apply_masks(logits: Tensor, masks: TokenMasks) -> None:
    """Set the logits [R, V] of all tokens to -inf that the mask of their row does not allow."""
    if logits.device.type == "cpu":
        _apply_in_place(logits, masks)
        return
    vocab_size = logits.shape[1]
    places = _upload(torch.tensor(masks.places, dtype=torch.int64), logits.device)  # [M]
    packed = torch.frombuffer(bytearray(masks.bits), dtype=torch.uint8).view(len(masks.places), mask_bytes(vocab_size))
    shifts = torch.arange(8, dtype=torch.uint8, device=logits.device)
    allowed = (_upload(packed, logits.device).unsqueeze(2) >> shifts & 1).bool().flatten(1)[:, :vocab_size]  # [M, V]
    masked = logits.index_select(0, places).masked_fill_(~allowed, float("-inf"))
    logits.index_copy_(0, places, masked)


def _apply_in_place(logits: Tensor, masks: TokenMasks) -> None:
    """Set the logits on a CPU: no row is copied, and a row with few allowed tokens is filled at once.

    One thread does this: the rows are too short for threads to be worth their synchronisation.
    """
    vocab_size = logits.shape[1]
    lines = logits.numpy()
    packed = np.frombuffer(masks.bits, dtype=np.uint8).reshape(len(masks.places), mask_bytes(vocab_size))
    allowed = np.unpackbits(packed, axis=1, count=vocab_size, bitorder="little").view(np.bool_)  # [M, V]
    for place, row in zip(masks.places, allowed, strict=True):
        line = lines[place]
        if np.count_nonzero(row) * _FEW < vocab_size:
            kept = np.flatnonzero(row)
            values = line[kept]
            line.fill(-np.inf)
            line[kept] = values
        else:
            np.copyto(line, -np.inf, where=~row)


def _upload(column: Tensor, device: torch.device) -> Tensor:
    """Return the tensor on the device; the host does not wait for the copy."""
    return column.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else column
