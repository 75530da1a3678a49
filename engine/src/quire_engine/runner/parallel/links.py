"""The connections of one rank to the ranks with which it computes, made from what the process that starts it has."""

import os
import socket
from dataclasses import dataclass

from quire_engine.model.divided import Links, OneRank, TensorGroup
from quire_engine.runner.parallel.local_ranks import Sockets
from quire_engine.runner.parallel.shared_memory import SharedMemoryGroup
from quire_engine.runner.parallel.streams import Stream, StreamGroup
from quire_engine.runner.parallel.topology import Topology


@dataclass(frozen=True, slots=True, kw_only=True)
class RankLinks:
    links: Links
    streams: tuple[Stream, ...]

    @property
    def waited_seconds(self) -> float:
        """The time for which the last step waited for the stage before this one."""
        before = self.links.before
        return before.waited_seconds if isinstance(before, Stream) else 0.0

    def reset_waited(self) -> None:
        for stream in self.streams:
            stream.waited_seconds = 0.0


def connect_links(topology: Topology, rank: int, sockets: Sockets) -> RankLinks:
    """Return the connections of a rank, which own its open files from now on."""
    streams = {peer: Stream(socket.socket(fileno=fd), peer) for peer, fd in sockets.streams.items()}
    group = topology.tensor_group(rank)
    tensor: TensorGroup
    if sockets.memory is not None:
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
