"""The libraries by which ranks on GPUs exchange data, and whether this torch has them.

Ranks in Triton's interpreter use gloo in place of NCCL.
"""

from dataclasses import dataclass
from typing import Literal

import torch

Collectives = Literal["nccl", "gloo"]


@dataclass(frozen=True, slots=True, kw_only=True)
class FoundCollectives:
    """The parts of torch.distributed that this torch has."""

    torch_version: str
    nccl: bool
    gloo: bool


def find_collectives() -> FoundCollectives:
    distributed = torch.distributed
    built = distributed.is_available()
    return FoundCollectives(
        torch_version=str(torch.__version__),
        nccl=built and distributed.is_nccl_available(),
        gloo=built and distributed.is_gloo_available(),
    )


def collectives_of(device_type: str) -> Collectives:
    return "nccl" if device_type == "cuda" else "gloo"


def collectives_problem(device_type: str, found: FoundCollectives) -> str | None:
    """Return why ranks on such devices cannot exchange data with this torch, or None."""
    if device_type == "cuda" and not found.nccl:
        return (
            f"torch {found.torch_version} is built without NCCL (RCCL for GPUs of AMD), by which GPUs exchange data:"
            " install a build with it"
        )
    if device_type != "cuda" and not found.gloo:
        return (
            f"torch {found.torch_version} is built without gloo, by which ranks in Triton's interpreter exchange data"
        )
    return None
