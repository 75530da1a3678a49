"""The rank processes of one node, and the memory and the sockets that they get when they start."""

import logging
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping

import msgspec

from quire_engine import config_json
from quire_engine.config import SECRET_VARIABLE, EngineConfig
from quire_engine.errors import EngineStartError
from quire_engine.runner.parallel.meeting import Link
from quire_engine.runner.parallel.topology import Topology, topology_of

_log = logging.getLogger(__name__)
_STDERR = 2
_CLOSE_SECONDS = 5.0


class Sockets(msgspec.Struct, frozen=True, kw_only=True):
    """The open files of a rank."""

    memory: int | None = None
    """The memory that its tensor group shares, if all of it is on one node."""
    streams: dict[int, int] = {}
    """The streams to its peers, by rank."""

    @property
    def descriptors(self) -> tuple[int, ...]:
        return (*self.streams.values(), *(() if self.memory is None else (self.memory,)))


def open_sockets(topology: Topology, node: int, remote: Mapping[Link, socket.socket]) -> dict[int, Sockets]:
    """Return the open files of each rank of a node; ``remote`` are its streams to other nodes.

    Raise EngineStartError if memory cannot be shared.
    """
    streams: dict[int, dict[int, int]] = {rank: {} for rank in topology.ranks_of(node)}
    for (rank, peer), connection in remote.items():
        streams[rank][peer] = connection.detach()
    for rank, peer in topology.local_links(node):
        own, other = socket.socketpair()
        streams[rank][peer], streams[peer][rank] = own.detach(), other.detach()
    memories = _share_memory(topology, node)
    return {rank: Sockets(memory=memories.get(rank), streams=streams[rank]) for rank in topology.ranks_of(node)}


def _share_memory(topology: Topology, node: int) -> dict[int, int]:
    """Return a descriptor of its tensor group's memory for each rank of a node whose group is on that node.

    The memory has no name, so that the kernel frees it with the last process. The ranks give it its size.
    """
    found: dict[int, int] = {}
    try:
        for rank in topology.ranks_of(node):
            if topology.shares_memory(rank):
                first = topology.tensor_group(rank)[0]
                found[rank] = os.memfd_create("quire-ranks") if rank == first else os.dup(found[first])
    except (OSError, AttributeError) as error:
        raise EngineStartError(f"the ranks cannot share memory: {error}; tensor parallelism needs Linux") from error
    return found


class LocalRanks:
    """The rank processes that this process has started."""

    def __init__(self, config: EngineConfig, on_ended: Callable[[str], None]) -> None:
        """Create the group without processes; ``on_ended`` is called in another thread when one of them ends."""
        self._config = config
        self._on_ended = on_ended
        self._topology = topology_of(config.parallel)
        self._children: dict[int, subprocess.Popen[bytes]] = {}
        self._closing = False

    def start(self, rank: int, connection: socket.socket, sockets: Sockets) -> None:
        """Start a rank. It gets the connection to rank 0 and its open files, which are closed here."""
        passed = (connection.fileno(), *sockets.descriptors)
        try:
            child = subprocess.Popen(
                (
                    # Modules of the working directory are not imported.
                    *(sys.executable, "-P", "-m", "quire_engine.runner.parallel.rank"),
                    *(str(rank), str(os.getpid()), str(connection.fileno())),
                    msgspec.json.encode(sockets).decode(),
                ),
                stdin=subprocess.PIPE,
                stdout=_STDERR,
                pass_fds=passed,
                env={name: value for name, value in os.environ.items() if name != SECRET_VARIABLE},
            )
        finally:
            connection.close()
            for descriptor in sockets.descriptors:
                os.close(descriptor)
        self._children[rank] = child
        assert child.stdin is not None
        with child.stdin as line:
            line.write(config_json.encode(self._config) + b"\n")
        threading.Thread(target=self._watch, args=(rank, child), name=f"rank {rank}", daemon=True).start()

    def _watch(self, rank: int, child: "subprocess.Popen[bytes]") -> None:
        ended = _ended(child.wait())
        if not self._closing:
            self._on_ended(f"rank {rank} of {self._topology.ranks} {ended}")

    def why_ended(self, rank: int) -> str:
        """Wait for the end of a rank of this node, and return it as text."""
        return _ended(self._children[rank].wait()) if rank in self._children else "has closed its connection"

    def close(self, *, kill: bool = False) -> None:
        """Wait for the ends of the ranks, whose connections to rank 0 are closed; kill those that do not end.

        ``kill`` ends them at once.
        """
        self._closing = True
        for child in self._children.values():
            if kill:
                child.kill()
        for child in self._children.values():
            try:
                child.wait(_CLOSE_SECONDS)
            except subprocess.TimeoutExpired:
                child.kill()
                child.wait()


def _ended(status: int) -> str:
    if status >= 0:
        return f"ended with exit status {status}"
    return f"was killed by {signal.Signals(-status).name}"
