"""Columns of sampling parameters for the sampling op, and what its reference makes of them."""

import torch
from torch import Tensor

from quire_kernels.sampling import reference

Settings = dict[str, float]
KEEP_ALL: Settings = {"temperature": 1.0, "top_p": 1.0, "min_p": 0.0, "typical_p": 1.0, "seeds": 1}


def columns(kinds: list[Settings], vocabulary: int, device: torch.device) -> dict[str, Tensor]:
    rows = [{**KEEP_ALL, "top_k": vocabulary, **kind} for kind in kinds]
    whole = ("top_k", "seeds")
    made = {
        name: torch.tensor([row[name] for row in rows], dtype=torch.int64 if name in whole else torch.float32)
        for name in (*KEEP_ALL, "top_k")
    }
    made["positions"] = torch.arange(len(kinds))
    return {name: column.to(device) for name, column in made.items()}


def expected(logits: Tensor, settings: dict[str, Tensor]) -> list[int]:
    on_cpu = {name: column.cpu() for name, column in settings.items()}
    tokens: list[int] = reference.sample(logits.cpu(), **on_cpu).tolist()
    return tokens
