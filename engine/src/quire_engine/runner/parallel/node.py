"""A node other than node 0: it joins the group, starts its ranks, and ends with the group.

The ranks get their batches from rank 0 directly. This process only watches, and needs no torch.
"""

import logging
import os
import queue
from collections.abc import Callable
from dataclasses import dataclass

import msgspec

from quire_engine.config import EngineConfig
from quire_engine.errors import EngineStartError
from quire_engine.group_secret import read_secret
from quire_engine.runner.parallel.agreement import membership
from quire_engine.runner.parallel.interfaces import choose_interface
from quire_engine.runner.parallel.local_ranks import LocalRanks, open_sockets
from quire_engine.runner.parallel.meeting import join
from quire_engine.runner.parallel.messages import Beat, Formed, RankRefused, ToNode, Welcome
from quire_engine.runner.parallel.node_watch import NodeWatch
from quire_engine.runner.parallel.topology import topology_of

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class GroupRuns:
    """All ranks of the group are ready."""


@dataclass(frozen=True, slots=True)
class GroupEnded:
    """The group ended, or will never run."""

    reason: str
    exit_code: int = 1


class Node:
    """The ranks of this node, as a part of a group."""

    def __init__(self, config: EngineConfig, wake: Callable[[], None]) -> None:
        """Join the group and start the ranks; ``wake`` is called in other threads when ``take`` has an event.

        Raise EngineStartError or FlagsError if the group does not form.
        """
        parallel = config.parallel
        self._wake = wake
        self._events: queue.SimpleQueue[GroupRuns | GroupEnded] = queue.SimpleQueue()
        met = join(parallel, membership(config), read_secret(parallel, os.environ))
        self._control = met.nodes[0]
        choose_interface(self._control.stream)
        self._local = LocalRanks(config, lambda reason: self._add(GroupEnded(reason)))
        try:
            sockets = open_sockets(topology_of(parallel), parallel.node_rank, met.streams)
            for rank, connection in met.ranks.items():
                self._local.start(rank, connection, sockets[rank])
        except OSError as error:
            self.close()
            raise EngineStartError(f"the ranks cannot be started: {error}") from error
        self._watch = NodeWatch(met.nodes, self._lost, config.engine_process.hang_timeout_seconds, self._hear)
        _log.info("joined the group; ranks %s load their parts of the model", ", ".join(map(str, met.ranks)))

    def take(self) -> GroupRuns | GroupEnded | None:
        """Return the next event; None if nothing has happened."""
        try:
            return self._events.get_nowait()
        except queue.Empty:
            return None

    def close(self) -> None:
        """End the ranks of this node, and leave the group."""
        self._local.close(kill=True)
        self._control.close()

    def _add(self, event: GroupRuns | GroupEnded) -> None:
        self._events.put(event)
        self._wake()

    def _lost(self, reason: str, *, silent: bool) -> None:
        self._add(GroupEnded(reason))

    def _hear(self, frame: bytes) -> None:
        message: Welcome | Formed | RankRefused | Beat = msgspec.msgpack.decode(frame, type=ToNode)
        if isinstance(message, Formed):
            self._add(GroupRuns())
        elif isinstance(message, RankRefused):
            self._add(GroupEnded(message.message, message.exit_code))
