"""The exchange of data between ranks: sums over the ranks of a stage, and the residual stream between stages.

The sums of ranks on CPUs of one machine go through memory. Everything else goes over process groups of
torch.distributed: NCCL on GPUs (torch's build for ROCm has RCCL under its name), gloo on CPUs and where CPU tensors
stand for a GPU's. The ranks of a stage are a group, and so are two ranks of which one sends to the other.

On GPUs everything is issued to the current stream in the order of steps, and the host waits for none of it.

Legend: T tokens, H hidden size.
"""

import contextlib
import fcntl
import ipaddress
import mmap
import os
import socket
import struct
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch._C import _distributed_c10d as dist

from quire_engine.errors import EngineError
from quire_engine.model.divided import Links, OneRank, TensorGroup
from quire_engine.runner.accelerator import Mark, make_accelerator
from quire_engine.runner.parallel.messages import FOREVER
from quire_engine.runner.parallel.store import StorePlace, first_line
from quire_engine.runner.parallel.topology import Topology
from quire_kernels.dispatch import runs_triton

CPU = torch.device("cpu")
_SIOCGIFADDR = 0x8915
_ADDRESS_IN_REQUEST = slice(20, 24)
_IPV6_ADDRESSES = Path("/proc/net/if_inet6")


class RankLost(EngineError):
    """Another rank has closed its connection."""

    def __init__(self, error: Exception) -> None:
        super().__init__(f"the engine process lost another rank of its group: {first_line(error)}")


class SharedMemoryGroup:
    """A ``model.divided.TensorGroup`` over memory without a name that all ranks have mapped."""

    def __init__(self, descriptor: int, *, rank: int, ranks: int) -> None:
        """Map the memory, and give it its size; the descriptor may be closed afterwards."""
        from quire_kernels.all_reduce import SharedRings, shared_bytes  # needs numba

        os.ftruncate(descriptor, shared_bytes(ranks))
        mapped = mmap.mmap(descriptor, shared_bytes(ranks))
        self._rings = SharedRings(np.frombuffer(mapped, dtype=np.uint8), rank=rank, ranks=ranks)

    def all_reduce(self, x: Tensor) -> Tensor:
        return self._rings.all_reduce(x.contiguous())

    def gather(self, x: Tensor, widths: Sequence[int]) -> Tensor:
        return self._rings.gather(x.contiguous(), widths)


class DistributedGroup:
    """A ``model.divided.TensorGroup`` over a process group. Every rank gets the result of ``gather``."""

    def __init__(self, ranks: int, *, in_order: bool = False) -> None:
        """Create the group of so many ranks, without connections.

        in_order  add in the order of ranks, in float32, as shared memory does: the order of a library depends on the
                  place of a number in the tensor, and so on the other rows of a step
        """
        self._ranks = ranks
        self._in_order = in_order
        self.group: Any = None

    def all_reduce(self, x: Tensor) -> Tensor:
        x = x.contiguous()
        if not x.numel():
            return x
        if not self._in_order:
            with _lost_ranks():
                self.group.allreduce([x]).wait()
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
        with _lost_ranks():
            self.group.allgather([found], [x]).wait()
        return found


@contextlib.contextmanager
def _lost_ranks() -> Iterator[None]:
    """Turn what a library raises into RankLost."""
    try:
        yield
    except RuntimeError as error:
        raise RankLost(error) from error


class DistributedStream:
    """A ``model.divided.StageBefore`` or ``StageAfter``: the connection to a rank of the stage before or the next one.

    A send does not hold up the next step: it is waited for only after ``steps`` further ones.
    """

    def __init__(self, peer: int, *, device: torch.device, steps: int, mark: Callable[[], Mark]) -> None:
        """Create it without a connection.

        peer   the place of the other rank in the group of two
        steps  the number of steps that are in flight at most
        mark   returns a mark in the current stream, for the time that a step waits
        """
        self._peer, self._device, self._steps, self._mark = peer, device, steps, mark
        self._sent: deque[tuple[Any, Tensor]] = deque()
        self.group: Any = None
        self.wait: tuple[Mark, Mark] | None = None
        """The marks before and after the last ``receive``."""

    def receive(self, rows: int, columns: int, dtype: torch.dtype) -> Tensor:
        x = torch.empty((rows, columns), dtype=dtype, device=self._device)  # [T, H]
        began = self._mark()
        with _lost_ranks():
            # On a GPU this lets the current stream wait, not the host.
            self.group.recv([x], self._peer, 0).wait()
        self.wait = (began, self._mark())
        return x

    def send(self, residual: Tensor) -> None:
        residual = residual.contiguous()
        with _lost_ranks():
            # The tensor must live until it is sent.
            self._sent.append((self.group.send([residual], self._peer, 0), residual))
            if len(self._sent) > self._steps:
                self._sent.popleft()[0].wait()

    def close(self) -> None:
        self._sent.clear()
        self.group = None


class RankLinks:
    """The connections of one rank to those with which it computes: its tensor group, and the stages around its own."""

    def __init__(
        self,
        topology: Topology,
        rank: int,
        device: torch.device = CPU,
        *,
        memory: int | None,
        place: StorePlace | None,
        in_order: bool,
    ) -> None:
        """Create them without connections over the network.

        memory    the memory of the tensor group, which is closed here; None if it is on several nodes
        place     the store through which ranks find each other; None if memory is enough
        in_order  sum in the order of ranks on GPUs, as ranks on CPUs always do
        """
        self._topology, self._rank, self._device, self._place = topology, rank, device, place
        self._connected = False
        on_device, ranks = runs_triton(device.type), topology.tensor_group(rank)
        mark = make_accelerator(device).mark

        def stream(peer: int, place: int) -> DistributedStream | None:
            if not 0 <= peer < topology.ranks:
                return None
            return DistributedStream(place, device=device, steps=topology.stages, mark=mark)

        self._group: DistributedGroup | None = None
        tensor: TensorGroup = OneRank()
        if memory is not None and not on_device:
            tensor = SharedMemoryGroup(memory, rank=rank - ranks[0], ranks=len(ranks))
        elif len(ranks) > 1:
            tensor = self._group = DistributedGroup(len(ranks), in_order=in_order or not on_device)
        if memory is not None:
            os.close(memory)
        self._before, self._after = stream(rank - topology.tensor, 0), stream(rank + topology.tensor, 1)
        self.links = Links(part=topology.part(rank), tensor=tensor, before=self._before, after=self._after)

    @property
    def waited(self) -> tuple[Mark, Mark] | None:
        """The marks around the wait of the last step for the stage before this one; None on the first stage."""
        return None if self._before is None else self._before.wait

    def connect(self, timeout_seconds: float) -> None:
        """Connect to the other ranks, which call this at the same time. Raise RuntimeError or StoreLost if that fails.

        Neighbours connect in the order of stages, so that no rank waits for one that waits for it.
        """
        pairs = ((self._before, self._rank - self._topology.tensor), (self._after, self._rank))
        wanted = [(stream, [first, first + self._topology.tensor]) for stream, first in pairs if stream is not None]
        if self._connected or (self._group is None and not wanted):
            return
        assert self._place is not None, "ranks that exchange data over the network have a store"
        store = self._place.connect()
        own, timeout = self._place.own, timedelta(seconds=timeout_seconds)

        def join(name: str, ranks: Sequence[int]) -> Any:
            return join_process_group(name, ranks, self._rank, self._device, store=store, own=own, timeout=timeout)

        if self._group is not None:
            self._group.group = join("stage", self._topology.tensor_group(self._rank))
        for stream, two in wanted:
            stream.group = join("neighbours", two)
        self._connected = True

    def close(self) -> None:
        """Close the connections, without waiting for ranks that may be lost."""
        links = [link for link in (self._group, self._before, self._after) if link is not None]
        if self._device.type == "cuda":
            for link in links:
                if link.group is not None:
                    link.group.abort()
        for link in links:
            link.group = None
        for stream in (self._before, self._after):
            if stream is not None:
                stream.close()


def join_process_group(
    name: str,
    ranks: Sequence[int],
    rank: int,
    device: torch.device,
    *,
    store: dist.Store,
    own: str,
    timeout: timedelta,
) -> Any:
    """Return the process group of ``ranks``, which all call this. Raise RuntimeError if that fails.

    name  what the group is for: the same ranks may have several
    own   the address of this machine on which gloo or NCCL listens
    """
    prefixed = dist.PrefixStore(f"{name} {list(ranks)}", store)
    place, size = ranks.index(rank), len(ranks)
    if device.type != "cuda":
        gloo: Any = dist.ProcessGroupGloo
        options = gloo._Options()
        options._timeout = timeout
        options._devices = [gloo.create_device(hostname=own)]
        group = gloo(prefixed, place, size, options)
        group._set_default_timeout(FOREVER)
        return group
    choose_interface(own)
    nccl_options = dist.ProcessGroupNCCL.Options()
    nccl_options._timeout = timeout
    nccl = dist.ProcessGroupNCCL(prefixed, place, size, nccl_options)
    # The communicator is made at once, so that its memory is counted, and an error ends the start.
    nccl.eager_connect_single_device(device)
    return nccl


def choose_interface(own: str) -> None:
    """Let NCCL listen on the interface with this address, unless its variables are set: it would take any."""
    address = ipaddress.ip_address(own.partition("%")[0])
    if (name := interface_of(address)) is not None:
        os.environ.setdefault("NCCL_SOCKET_IFNAME", f"={name}")  # exactly this one, not all whose names begin so
        os.environ.setdefault("NCCL_SOCKET_FAMILY", "AF_INET" if address.version == 4 else "AF_INET6")


def interface_of(address: ipaddress.IPv4Address | ipaddress.IPv6Address) -> str | None:
    """Return the name of this machine's interface with an address, or None."""
    if address.is_loopback:
        return "lo"
    if isinstance(address, ipaddress.IPv6Address):
        lines = _IPV6_ADDRESSES.read_text().splitlines() if _IPV6_ADDRESSES.exists() else []
        return next((line.split()[-1] for line in lines if line.startswith(address.packed.hex())), None)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asking:
        for _, name in socket.if_nameindex():
            try:
                found = fcntl.ioctl(asking.fileno(), _SIOCGIFADDR, struct.pack("256s", name.encode()))
            except OSError:
                continue  # it has no IPv4 address
            if found[_ADDRESS_IN_REQUEST] == address.packed:
                return name
    return None
