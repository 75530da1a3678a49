"""The rank processes of one node, and what they get when they start."""

import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable

import msgspec

from quire_engine import config_json
from quire_engine.config import SECRET_VARIABLE, EngineConfig
from quire_engine.errors import EngineStartError
from quire_engine.runner.parallel.store import StorePlace
from quire_engine.runner.parallel.topology import Topology, topology_of

_STDERR = 2
_CLOSE_SECONDS = 5.0


class Given(msgspec.Struct, frozen=True, kw_only=True):
    """The start options of a rank, which owns the open files."""

    parent: int
    """The number of the process that starts it."""
    connection: int | None
    """The socket to rank 0, if that runs on the same node."""
    memory: int | None
    """The memory that its tensor group shares, if all of it is on one node."""
    place: StorePlace | None
    """The store of the group, unless everything goes through memory and sockets."""


def share_memory(topology: Topology, node: int) -> dict[int, int | None]:
    """Return for each rank of a node a descriptor of its tensor group's memory, or None if that is on several nodes.

    The memory has no name, so that the kernel frees it with the last process. The ranks give it its size. Raise
    EngineStartError if memory cannot be shared.
    """
    found: dict[int, int | None] = {}
    try:
        for rank in topology.ranks_of(node):
            first = topology.tensor_group(rank)[0]
            if not topology.shares_memory(rank):
                found[rank] = None
            else:
                found[rank] = os.memfd_create("quire-ranks") if rank == first else os.dup(found[first])  # type: ignore[arg-type]
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

    def start(
        self, rank: int, *, memory: int | None, place: StorePlace | None, connection: socket.socket | None = None
    ) -> None:
        """Start a rank. It gets the memory, and its connection to rank 0, which are closed here."""
        given = Given(
            parent=os.getpid(),
            connection=None if connection is None else connection.fileno(),
            memory=memory,
            place=place,
        )
        try:
            child = subprocess.Popen(
                (
                    # Modules of the working directory are not imported.
                    *(sys.executable, "-P", "-m", "quire_engine.runner.parallel.rank"),
                    *(str(rank), msgspec.json.encode(given).decode()),
                ),
                stdin=subprocess.PIPE,
                stdout=_STDERR,
                pass_fds=[descriptor for descriptor in (given.connection, memory) if descriptor is not None],
                env={name: value for name, value in os.environ.items() if name != SECRET_VARIABLE},
            )
        finally:
            if connection is not None:
                connection.close()
            if memory is not None:
                os.close(memory)
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
