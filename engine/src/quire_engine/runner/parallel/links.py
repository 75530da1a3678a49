"""The connections of one rank to the ranks with which it computes, made from what the process that starts it has."""

import os
import socket
from dataclasses import dataclass

import torch

from quire_engine.model.divided import Links, OneRank, TensorGroup
from quire_engine.runner.device.accelerator import make_accelerator
from quire_engine.runner.parallel.device_group import DeviceRanks
from quire_engine.runner.parallel.local_ranks import Sockets
from quire_engine.runner.parallel.rank_store import RankStore
from quire_engine.runner.parallel.streams import RankConnection, StreamGroup
from quire_engine.runner.parallel.topology import Topology
from quire_kernels.dispatch import runs_triton

CPU = torch.device("cpu")


@dataclass(frozen=True, slots=True, kw_only=True)
class RankLinks:
    links: Links
    streams: tuple[RankConnection, ...] = ()
    """The streams of a rank on a CPU."""
    devices: DeviceRanks | None = None
    """The connections of a rank on a GPU, which are made when all ranks have their weights."""

    @property
    def waited_seconds(self) -> float:
        """The time for which the last step waited for the stage before this one."""
        before = self.links.before
        return before.waited_seconds if isinstance(before, RankConnection) else 0.0

    def reset_waited(self) -> None:
        for stream in self.streams:
            stream.waited_seconds = 0.0


def connect_links(
    topology: Topology, rank: int, sockets: Sockets, device: torch.device = CPU, *, in_order: bool = False
) -> RankLinks:
    """Return the connections of a rank on ``device``, which own its open files from now on.

    in_order  sum in the order of ranks on GPUs, as ranks on CPUs always do
    """
    if runs_triton(device.type):
        return _connect_devices(topology, rank, sockets, device, in_order=in_order)
    streams = {peer: RankConnection(socket.socket(fileno=fd), peer) for peer, fd in sockets.streams.items()}
    group = topology.tensor_group(rank)
    tensor: TensorGroup
    if sockets.memory is not None:
        from quire_engine.runner.parallel.shared_memory import SharedMemoryGroup  # needs numba

        tensor = SharedMemoryGroup(sockets.memory, rank=rank - group[0], ranks=len(group))
        os.close(sockets.memory)
    elif len(group) > 1:
        tensor = StreamGroup([streams.get(other) for other in group])
    else:
        tensor = OneRank()
    links = Links(
        part=topology.part(rank),
        tensor=tensor,
        before=streams.get(rank - topology.tensor),
        after=streams.get(rank + topology.tensor),
    )
    return RankLinks(links=links, streams=tuple(streams.values()))


def _connect_devices(
    topology: Topology, rank: int, sockets: Sockets, device: torch.device, *, in_order: bool
) -> RankLinks:
    """Return the connections of a rank on a GPU: of its streams, only those to and from rank 0 are used."""
    if sockets.memory is not None:
        os.close(sockets.memory)
    meeting = {}
    for peer, descriptor in sockets.streams.items():
        if 0 in (rank, peer):
            meeting[peer] = socket.socket(fileno=descriptor)
        else:
            os.close(descriptor)
    devices = DeviceRanks(
        topology, rank, RankStore(meeting), device=device, mark=make_accelerator(device).mark, in_order=in_order
    )
    links = Links(part=topology.part(rank), tensor=devices.tensor, before=devices.before, after=devices.after)
    return RankLinks(links=links, devices=devices)
