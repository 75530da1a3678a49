"""The watch of one node over its connections to others: both sides send a sign of life every second."""

import select
import threading
import time
from collections.abc import Callable, Mapping
from typing import Protocol

from quire_engine.runner.parallel.messages import LONGEST_JOINING, Beat, Frames

_BEAT_SECONDS = 1.0


class OnLost(Protocol):
    def __call__(self, reason: str, *, silent: bool) -> None:
        """Handle the loss of a node; ``silent`` means that its connection is open."""


class NodeWatch:
    """A thread that notices when another node is gone or silent."""

    def __init__(
        self,
        nodes: Mapping[int, Frames],
        on_lost: OnLost,
        silence_seconds: float,
        on_frame: Callable[[bytes], None] = lambda frame: None,
    ) -> None:
        """Begin. ``on_lost`` is called once, when a node is lost, and ``on_frame`` for each message, in the thread."""
        self._nodes = nodes
        self._on_lost = on_lost
        self._on_frame = on_frame
        self._silence_seconds = silence_seconds
        self._closed = threading.Event()
        threading.Thread(target=self._run, name="watch over nodes", daemon=True).start()

    def close(self) -> None:
        self._closed.set()

    def _run(self) -> None:
        heard = dict.fromkeys(self._nodes, time.monotonic())
        beat_due = 0.0
        while not self._closed.is_set():
            if time.monotonic() >= beat_due:
                beat_due = time.monotonic() + _BEAT_SECONDS
                self._beat()
            reason = self._listen(heard)
            silent = [node for node, when in heard.items() if time.monotonic() - when > self._silence_seconds]
            if silent:
                reason = f"node {silent[0]} was silent for {self._silence_seconds:g} s"
            if reason is not None:
                if not self._closed.is_set():
                    self._on_lost(reason, silent=bool(silent))
                return

    def _listen(self, heard: dict[int, float]) -> str | None:
        """Receive what the nodes have sent within a second; return a reason if one of them is gone."""
        by_socket = {frames.stream: node for node, frames in self._nodes.items()}
        try:
            ready, _, _ = select.select(list(by_socket), [], [], _BEAT_SECONDS)
            for stream in ready:
                node = by_socket[stream]
                frame = self._nodes[node].receive(longest=LONGEST_JOINING)
                if frame is None:
                    return f"node {node} is gone"
                heard[node] = time.monotonic()
                self._on_frame(frame)
        except (OSError, ValueError) as error:
            return f"the connection to another node failed: {error}"
        return None

    def _beat(self) -> None:
        for frames in self._nodes.values():
            try:
                frames.send(Beat())
            except OSError:
                continue  # the node is gone, which its connection shows to ``_listen``
