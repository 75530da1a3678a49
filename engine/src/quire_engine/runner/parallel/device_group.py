"""The connections of ranks on GPUs: torch.distributed with NCCL, or with gloo where CPU tensors stand for a GPU's.

torch's build for ROCm has RCCL under the name of NCCL, and reads the same variables. The ranks of a stage are a group,
and so are two ranks of which one sends to the other.

Everything is issued to the current stream in the order of steps, and the host waits for none of it.

Legend: T tokens, H hidden size.
"""

import os
from collections import deque
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor

from quire_engine.model.divided import OneRank, TensorGroup
from quire_engine.runner.device.accelerator import Mark
from quire_engine.runner.parallel.collectives import collectives_of
from quire_engine.runner.parallel.rank_store import RankStore
from quire_engine.runner.parallel.topology import Topology


class DeviceGroup:
    """A ``model.divided.TensorGroup`` over torch.distributed. Every rank gets the result of ``gather``."""

    def __init__(self, ranks: int, *, in_order: bool = False, distributed: Any = torch.distributed) -> None:
        """Create the group of so many ranks, without connections.

        in_order  add in the order of ranks, in float32: the order of NCCL depends on the place of a number in the
                  tensor, and so on the other rows of a step
        """
        self._ranks = ranks
        self._in_order = in_order
        self._distributed = distributed
        self.group: Any = None

    def all_reduce(self, x: Tensor) -> Tensor:
        x = x.contiguous()
        if not self._in_order:
            self._distributed.all_reduce(x, group=self.group)
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
        self._distributed.all_gather(found, x, group=self.group)
        return found


class DeviceStream:
    """A ``model.divided.StageBefore`` or ``StageAfter``: the connection to a rank of the stage before or the next one.

    A send does not hold up the next step: the stream waits for it only after ``steps`` further ones.
    """

    def __init__(
        self,
        peer: int,
        *,
        device: torch.device,
        steps: int,
        mark: Callable[[], Mark],
        distributed: Any = torch.distributed,
    ) -> None:
        """Create it without a connection.

        steps  the number of steps that are in flight at most
        mark   returns a mark in the current stream, for the time that a step waits
        """
        self._peer, self._device, self._steps, self._mark = peer, device, steps, mark
        self._distributed = distributed
        self._sent: deque[tuple[Any, Tensor]] = deque()
        self.group: Any = None
        self.wait: tuple[Mark, Mark] | None = None
        """The marks before and after the last ``receive``."""

    def receive(self, rows: int, columns: int, dtype: torch.dtype) -> Tensor:
        x = torch.empty((rows, columns), dtype=dtype, device=self._device)  # [T, H]
        began = self._mark()
        # On a GPU this lets the current stream wait, not the host.
        self._distributed.irecv(x, self._peer, group=self.group).wait()
        self.wait = (began, self._mark())
        return x

    def send(self, residual: Tensor) -> None:
        residual = residual.contiguous()
        # The tensor must live until it is sent.
        self._sent.append((self._distributed.isend(residual, self._peer, group=self.group), residual))
        if len(self._sent) > self._steps:
            self._sent.popleft()[0].wait()


class DeviceRanks:
    """The place of one rank among all ranks on GPUs: its tensor group, and the stages before and after its own."""

    def __init__(
        self,
        topology: Topology,
        rank: int,
        store: RankStore,
        *,
        device: torch.device,
        mark: Callable[[], Mark],
        in_order: bool = False,
        distributed: Any = torch.distributed,
    ) -> None:
        """Create it without connections, and own the store. See ``DeviceGroup`` and ``DeviceStream``."""
        self._topology, self._rank, self._store, self._device = topology, rank, store, device
        self._distributed = distributed
        self._joined = False

        def stream_to(peer: int) -> DeviceStream | None:
            if not 0 <= peer < topology.ranks:
                return None
            return DeviceStream(peer, device=device, steps=topology.stages, mark=mark, distributed=distributed)

        self._group: DeviceGroup | None = None
        if topology.tensor > 1:
            self._group = DeviceGroup(topology.tensor, in_order=in_order, distributed=distributed)
        self.tensor: TensorGroup = self._group or OneRank()
        self.before = stream_to(rank - topology.tensor)
        self.after = stream_to(rank + topology.tensor)

    def connect(self, timeout_seconds: float) -> None:
        """Meet the other ranks, which call this at the same time. Raise RuntimeError if that fails."""
        # Without these, libraries listen on a network interface, for everybody.
        os.environ.setdefault("NCCL_SOCKET_IFNAME", "lo")
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        backend, timeout = collectives_of(self._device.type), timedelta(seconds=timeout_seconds)
        self._store.wait_seconds = timeout_seconds
        self._distributed.init_process_group(
            backend,
            store=self._store,
            rank=self._rank,
            world_size=self._topology.ranks,
            timeout=timeout,
            # The communicator is made at once, so that its memory is counted, and an error ends the start.
            device_id=self._device if backend == "nccl" else None,
        )
        self._joined = True
        for ranks in _groups(self._topology):
            whole = len(ranks) == self._topology.ranks
            # All ranks make every group, in the same order, also those that they are not in.
            group = (
                self._distributed.group.WORLD if whole else self._distributed.new_group(list(ranks), timeout=timeout)
            )
            if self._rank in ranks:
                self._use(group, ranks)

    def _use(self, group: Any, ranks: Sequence[int]) -> None:
        if self._group is not None and tuple(ranks) == tuple(self._topology.tensor_group(self._rank)):
            self._group.group = group
        elif self.after is not None and self._rank == ranks[0]:
            self.after.group = group
        elif self.before is not None:
            self.before.group = group

    def close(self) -> None:
        """Leave the groups, if they were joined, without waiting for ranks that may be lost."""
        if self._joined:
            if collectives_of(self._device.type) == "nccl":
                links = (self._group, self.before, self.after)
                for link in links:
                    if link is not None and link.group not in (None, self._distributed.group.WORLD):
                        link.group.abort()
                self._distributed.group.WORLD.abort()
            else:
                self._distributed.destroy_process_group()
        self._joined = False
        self._store.close()


def _groups(topology: Topology) -> list[Sequence[int]]:
    """Return the ranks of each group: those that share layers, and each pair of which one sends to the other."""
    found: list[Sequence[int]] = []
    if topology.tensor > 1:
        found += [topology.tensor_group(first) for first in range(0, topology.ranks, topology.tensor)]
    return [*found, *((rank, rank + topology.tensor) for rank in range(topology.ranks - topology.tensor))]
