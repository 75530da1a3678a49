"""Token masks over the vocabulary, which apply between the forward pass and the sampling.

Legend: R rows of logits, V vocabulary, M masked rows.
"""

import torch
from torch import Tensor

from quire_engine.core.batch import TokenMasks, mask_bytes


def apply_masks(logits: Tensor, masks: TokenMasks) -> None:
    """Set the logits [R, V] of all tokens to -inf that the mask of their row does not allow."""
    vocab_size = logits.shape[1]
    places = _upload(torch.tensor(masks.places, dtype=torch.int64), logits.device)  # [M]
    packed = torch.frombuffer(bytearray(masks.bits), dtype=torch.uint8).view(len(masks.places), mask_bytes(vocab_size))
    shifts = torch.arange(8, dtype=torch.uint8, device=logits.device)
    allowed = (_upload(packed, logits.device).unsqueeze(2) >> shifts & 1).bool().flatten(1)[:, :vocab_size]  # [M, V]
    masked = logits.index_select(0, places).masked_fill_(~allowed, float("-inf"))
    logits.index_copy_(0, places, masked)


def _upload(column: Tensor, device: torch.device) -> Tensor:
    """Return the tensor on the device; the host does not wait for the copy."""
    return column.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else column
