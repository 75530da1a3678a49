"""The tensor group of ranks on GPUs: torch.distributed with NCCL, or with gloo where CPU tensors stand for a GPU's.

torch's build for ROCm has RCCL under the name of NCCL, and reads the same variables.

The ranks meet at a store in memory without a name, which only they have, as a descriptor from the process that started
them. All connections are made over loopback.
"""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Literal

import torch
from torch import Tensor

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


class DeviceGroup:
    """A ``model.divided.TensorGroup`` over torch.distributed. Every rank gets the result of ``gather``."""

    def __init__(
        self,
        descriptor: int,
        *,
        rank: int,
        ranks: int,
        device: torch.device,
        in_order: bool = False,
        distributed: Any = torch.distributed,
    ) -> None:
        """Create the group without connections, and own the descriptor of the memory for the store.

        in_order  add in the order of ranks, in float32: the order of NCCL depends on the place of a number in the
                  tensor, and so on the other rows of a step
        """
        self._descriptor: int | None = descriptor
        self._rank, self._ranks, self._device = rank, ranks, device
        self._in_order = in_order
        self._distributed = distributed
        self._group: Any = None

    def connect(self, timeout_seconds: float) -> None:
        """Meet the other ranks, which call this at the same time. Raise RuntimeError if that fails.

        The descriptor stays open until the process ends, because torch's threads open the store by its path.
        """
        assert self._descriptor is not None, "connected before"
        # Without these, libraries listen on a network interface, for everybody.
        os.environ.setdefault("NCCL_SOCKET_IFNAME", "lo")
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        backend, timeout = collectives_of(self._device.type), timedelta(seconds=timeout_seconds)
        store = self._distributed.FileStore(f"/proc/self/fd/{self._descriptor}", self._ranks)
        store.set_timeout(timeout)
        self._distributed.init_process_group(
            backend,
            store=store,
            rank=self._rank,
            world_size=self._ranks,
            timeout=timeout,
            # The communicator is made at once, so that its memory is counted, and an error ends the start.
            device_id=self._device if backend == "nccl" else None,
        )
        self._group = self._distributed.group.WORLD

    def all_reduce(self, x: Tensor) -> Tensor:
        x = x.contiguous()
        if not self._in_order:
            self._distributed.all_reduce(x, group=self._group)
            return x
        first, *others = self._gathered(x)
        total = first.float()
        for other in others:
            total += other
        return total.to(x.dtype)

    def gather(self, x: Tensor, widths: Sequence[int]) -> Tensor:
        widest = max(widths)
        if x.shape[1] < widest:
            x = torch.nn.functional.pad(x, (0, widest - x.shape[1]))
        parts = self._gathered(x.contiguous())
        return torch.cat([part[:, :width] for part, width in zip(parts, widths, strict=True)], dim=1)

    def _gathered(self, x: Tensor) -> list[Tensor]:
        """Return ``x`` of every rank, in the order of ranks."""
        found = list(x.new_empty((self._ranks, *x.shape)).unbind())
        self._distributed.all_gather(found, x, group=self._group)
        return found

    def close(self) -> None:
        """Leave the group, if it was joined, without waiting for ranks that may be lost."""
        if self._group is None:
            if self._descriptor is not None:
                os.close(self._descriptor)
        elif collectives_of(self._device.type) == "nccl":
            self._group.abort()
        else:
            self._distributed.destroy_process_group()
        self._group = self._descriptor = None
