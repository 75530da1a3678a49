"""The watch of one node over others, and a node other than node 0: it joins the group, and ends with it.

The ranks get their batches from rank 0 directly. Every node shows in the store that it is there.
"""

import contextlib
import logging
import os
import queue
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Protocol

import msgspec

from quire_engine.config import EngineConfig
from quire_engine.errors import EngineStartError
from quire_engine.group_secret import read_secret
from quire_engine.runner.parallel.agreement import membership
from quire_engine.runner.parallel.local_ranks import LocalRanks, share_memory
from quire_engine.runner.parallel.rendezvous import join
from quire_engine.runner.parallel.store import GroupStore, StoreLost
from quire_engine.runner.parallel.topology import topology_of

_log = logging.getLogger(__name__)
_SIGN_SECONDS = 0.5


@dataclass(frozen=True, slots=True)
class GroupRuns:
    """All ranks of the group are ready."""


class GroupEnded(msgspec.Struct, frozen=True):
    """The group ended, or will never run."""

    reason: str
    exit_code: int = 1


class OnLost(Protocol):
    def __call__(self, reason: str, *, silent: bool) -> None:
        """Handle the loss of a node; ``silent`` means that nothing else shows it."""


class NodeWatch:
    """A thread that shows other nodes that this one is there, and notices when one of them is gone or silent."""

    def __init__(
        self,
        store: GroupStore,
        own: int,
        others: Iterable[int],
        on_lost: OnLost,
        silence_seconds: float,
        look: Callable[[], None] = lambda: None,
    ) -> None:
        """Begin. In the thread, ``on_lost`` is called once if a node is lost, and ``look`` after every sign."""
        self._store, self._own, self._others = store, own, list(others)
        self._on_lost, self._look = on_lost, look
        self._silence_seconds = silence_seconds
        self._closed = threading.Event()
        threading.Thread(target=self._run, name="watch over nodes", daemon=True).start()

    def close(self) -> None:
        self._closed.set()

    def _run(self) -> None:
        began = time.monotonic()
        heard = dict.fromkeys(self._others, (0, began))
        while not self._closed.wait(_SIGN_SECONDS):
            try:
                self._store.add(f"sign/{self._own}", 1)
                for node, (before, _) in heard.items():
                    signs = self._store.add(f"sign/{node}", 0)
                    if signs != before:
                        heard[node] = signs, time.monotonic()
                self._look()
                now = time.monotonic()
                silent = [node for node, (_, when) in heard.items() if now - when > self._silence_seconds]
                if not silent:
                    continue
                reason = f"node {silent[0]} was silent for {self._silence_seconds:g} s"
            except StoreLost as error:
                reason = f"node 0 is gone: {error}"
            if not self._closed.is_set():
                self._on_lost(reason, silent=True)
            return


class Node:
    """The ranks of this node, as a part of a group."""

    def __init__(self, config: EngineConfig, wake: Callable[[], None]) -> None:
        """Join the group and start the ranks; ``wake`` is called in other threads when ``take`` has an event.

        Raise EngineStartError or FlagsError if the group does not form.
        """
        parallel = config.parallel
        self._wake = wake
        self._events: queue.SimpleQueue[GroupRuns | GroupEnded] = queue.SimpleQueue()
        self._runs = False
        self._own = parallel.node_rank
        silence_seconds = config.engine_process.hang_timeout_seconds
        store = join(parallel, membership(config), read_secret(parallel, os.environ), silence_seconds)
        self._store = store
        self._local = LocalRanks(config, self._leave)
        topology = topology_of(parallel)
        try:
            for rank, memory in share_memory(topology, self._own).items():
                self._local.start(rank, memory=memory, place=store.place)
        except OSError as error:
            self._local.close(kill=True)
            raise EngineStartError(f"the ranks cannot be started: {error}") from error
        self._watch = NodeWatch(store, self._own, [0], self._lost, silence_seconds, self._look)
        ranks = topology.ranks_of(self._own)
        _log.info("joined the group; ranks %s load their parts of the model", ", ".join(map(str, ranks)))

    def take(self) -> GroupRuns | GroupEnded | None:
        """Return the next event; None if nothing has happened."""
        try:
            return self._events.get_nowait()
        except queue.Empty:
            return None

    def close(self) -> None:
        """End the ranks of this node, and leave the group."""
        self._watch.close()
        self._local.close(kill=True)

    def _leave(self, reason: str) -> None:
        """Let node 0 know that this node cannot go on."""
        with contextlib.suppress(StoreLost):
            self._store.set(f"left/{self._own}", reason.encode())
        self._add(GroupEnded(reason))

    def _add(self, event: GroupRuns | GroupEnded) -> None:
        self._events.put(event)
        self._wake()

    def _lost(self, reason: str, *, silent: bool) -> None:
        self._add(GroupEnded(reason))

    def _look(self) -> None:
        """Read what node 0 says about the whole group."""
        if not self._runs and self._store.has("runs"):
            self._runs = True
            self._add(GroupRuns())
        if self._store.has("ended"):
            ended = msgspec.msgpack.decode(self._store.get("ended"), type=GroupEnded)
            self._store.set(f"read/{self._own}", b"1")
            self._watch.close()
            self._add(ended)
