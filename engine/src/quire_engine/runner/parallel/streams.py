"""Data between ranks over stream sockets: the residual stream between stages, and sums between nodes.

Both sides know the shapes, so that only the bytes of tensors are sent. A rank that sends does not wait until the other
one receives: what does not fit into the socket's buffer is sent by a thread.

Legend: T tokens or rows, H columns.
"""

import contextlib
import socket
import threading
import time
from collections import deque
from collections.abc import Sequence

import torch
from torch import Tensor

from quire_engine.errors import EngineError


class StreamLost(EngineError):
    """The other rank has closed its end."""

    def __init__(self, peer: int, error: object) -> None:
        super().__init__(f"the engine process lost another rank of its group: rank {peer}: {error}")


class RankConnection:
    """A connection to another rank of the group."""

    def __init__(self, connected: socket.socket, peer: int) -> None:
        connected.setblocking(True)
        self._socket = connected
        self._peer = peer
        self._unsent: deque[tuple[Tensor, memoryview]] = deque()
        self._changed = threading.Condition()
        self._sender: threading.Thread | None = None
        self._closed = False
        self.waited_seconds = 0.0
        """The time spent in ``receive`` since it was last set to 0."""

    def send(self, x: Tensor) -> None:
        """Send the bytes of ``x``, which must not be changed afterwards."""
        x = x.contiguous()
        data = x.view(-1).view(torch.uint8).numpy().data
        with self._changed:
            if not self._unsent:
                data = data[self._send_at_once(data) :]
            if len(data):
                self._unsent.append((x, data))
                if self._sender is None:
                    self._sender = threading.Thread(target=self._send_rest, name=f"to rank {self._peer}", daemon=True)
                    self._sender.start()
                self._changed.notify()

    def _send_at_once(self, data: memoryview) -> int:
        """Send what fits into the socket's buffer, and return its size."""
        try:
            return self._socket.send(data, socket.MSG_DONTWAIT)
        except BlockingIOError:
            return 0
        except OSError as error:
            raise StreamLost(self._peer, error) from error

    def _send_rest(self) -> None:
        while True:
            with self._changed:
                while not self._unsent and not self._closed:
                    self._changed.wait()
                if self._closed:
                    return
                _, data = self._unsent[0]
            try:
                self._socket.sendall(data)
            except OSError:
                return  # the process notices it when it receives, and its group when the other rank ends
            with self._changed:
                self._unsent.popleft()

    def receive(self, rows: int, columns: int, dtype: torch.dtype) -> Tensor:
        """Wait for the next tensor [rows, columns] and return it. Raise StreamLost if the other rank is gone."""
        began = time.perf_counter()
        x = torch.empty((rows, columns), dtype=dtype)
        data = x.view(-1).view(torch.uint8).numpy().data
        while len(data):
            try:
                count = self._socket.recv_into(data, len(data), socket.MSG_WAITALL)
            except OSError as error:
                raise StreamLost(self._peer, error) from error
            if not count:
                raise StreamLost(self._peer, "the stream was closed")
            data = data[count:]
        self.waited_seconds += time.perf_counter() - began
        return x

    def close(self) -> None:
        """Close the connection; what is not sent yet is dropped."""
        with self._changed:
            self._closed = True
            self._changed.notify()
        with contextlib.suppress(OSError):  # the other rank may have closed it
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()


class StreamGroup:
    """A ``model.divided.TensorGroup`` whose ranks are on several nodes: each sends its tensor to all others.

    Sums are those of shared memory: in float32, in the order of the ranks, rounded once.
    """

    def __init__(self, streams: Sequence[RankConnection | None]) -> None:
        """Create the group; ``streams`` has an entry per rank, None for this one."""
        self._streams = streams
        self._rank = streams.index(None)

    def all_reduce(self, x: Tensor) -> Tensor:
        if not x.numel():
            return x
        for stream in self._streams:
            if stream is not None:
                stream.send(x)
        total = torch.zeros_like(x, dtype=torch.float32)
        for stream in self._streams:
            total += x if stream is None else stream.receive(x.shape[0], x.shape[1], x.dtype)
        return total.to(x.dtype)

    def gather(self, x: Tensor, widths: Sequence[int]) -> Tensor:
        if self._rank:
            first = self._streams[0]
            assert first is not None
            first.send(x)
            return x
        parts = [
            x if stream is None else stream.receive(x.shape[0], width, x.dtype)
            for stream, width in zip(self._streams, widths, strict=True)
        ]
        return torch.cat(parts, dim=1)
