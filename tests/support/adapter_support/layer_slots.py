"""Slots of a linear layer that are filled with random adapters."""

import torch

from quire_kernels.lora import LayerSlots, allocate_slots


def filled_slots(
    *,
    slots: int,
    max_rank: int,
    inputs: int,
    parts: tuple[int, ...],
    dtype: torch.dtype,
    ranks: list[int],
    device: torch.device | None = None,
) -> LayerSlots:
    """Return slots in which part p of slot s has rank ranks[(s + p) % len(ranks)], and NaN where nothing is read."""
    made = allocate_slots(slots=slots, max_rank=max_rank, inputs=inputs, parts=parts, dtype=dtype, device=device)
    largest = made.b.shape[1]
    made.a.fill_(torch.nan)
    made.b.fill_(torch.nan)
    for slot in range(slots):
        begin = 0
        for part, outputs in enumerate(parts):
            rank = ranks[(slot + part) % len(ranks)]
            filled = -(-rank // 8) * 8
            a, b = made.a[slot, part * largest :][:filled], made.b[slot, :filled, begin : begin + outputs]
            a.zero_()
            b.zero_()
            a[:rank] = (torch.randn(rank, inputs) * inputs**-0.5).to(dtype)
            b[:rank] = (torch.randn(rank, outputs) * rank**-0.5).to(dtype) if rank else 0.0
            made.ranks[slot, part] = rank
            begin += outputs
    return made
