"""The messages between rank 0 and the other ranks, and the channels over which they go.

A message is MessagePack. Between processes of one machine it goes over a pair of sockets, in a tenth of the time that
gloo takes, and between nodes over gloo.
"""

import socket
import struct
from collections import deque
from datetime import timedelta
from typing import Any, Protocol

import msgspec
import torch
from torch import Tensor

from quire_engine.core.batch import Batch, RunnerOutput, TokenMasks
from quire_engine.runner.cache_size import CacheSize
from quire_engine.runner.device_budget import DeviceUse
from quire_engine.runner.memory import AvailableMemory
from quire_engine.runner.parallel.store import first_line

_NEVER_SENT = 1
"""The tag of a message of which only the failure is waited for."""
_LENGTH = struct.Struct("<I")

# --- rank 0 -> another rank ---


class Begin(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The first message: the device and the arithmetic that rank 0 has chosen for all ranks."""

    gpu: str | None
    """The name of rank 0's GPU; None if it computes on a CPU."""
    dtype: str
    backend: str


class Connect(msgspec.Struct, frozen=True, tag=True):
    """A command to connect to the ranks with which this one exchanges data: all of them have their weights."""


class Measure(msgspec.Struct, frozen=True, tag=True):
    """A question for the memory of the rank, which ``Measured`` answers.

    Ranks on GPUs, which all get it, run the largest step together to find out.
    """


class Allocate(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The KV cache to allocate, and from which number of tokens steps are shared among the threads of a rank."""

    size: CacheSize
    shared_asleep: int
    shared_spinning: int


class StepMessage(msgspec.Struct, frozen=True, tag=True):
    """A batch to run; only ranks that sample get what sampling needs."""

    batch: Batch


class Sample(msgspec.Struct, frozen=True, tag=True):
    """A command to sample after the last step, which the last stage answers with ``Sampled``."""

    masks: TokenMasks | None


# --- another rank -> rank 0 ---


class Loaded(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """A rank has its weights in memory."""

    weight_bytes: int


class RankRefused(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """A rank cannot load its part of the model."""

    message: str
    exit_code: int


class Measured(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The memory that a rank can use after it has its weights."""

    available: AvailableMemory | None = None
    """The memory that is left on a node, for ranks on CPUs; None if it is unknown."""
    use: DeviceUse | None = None
    """The use of a GPU."""


class Sampled(msgspec.Struct, frozen=True, tag=True):
    output: RunnerOutput


ToRank = Begin | Connect | Measure | Allocate | StepMessage | Sample
FromRank = Loaded | RankRefused | Measured | Sampled

_ENCODER = msgspec.msgpack.Encoder()
_PACKET_BYTES = 4096
"""gloo needs to know how much to receive: the first part of a message has this size, and begins with the whole size."""
_MOST_UNSENT = 64
FOREVER = timedelta(days=365)
"""gloo ends a connection after its limit of time, and a rank may be idle for long."""


def encode(message: msgspec.Struct) -> bytes:
    """Return the bytes of a message."""
    return _ENCODER.encode(message)


class Channel(Protocol):
    def send(self, frame: bytes) -> None:
        """Send an encoded message. Raise OSError if the other side is gone."""
        ...

    def receive(self) -> bytes | None:
        """Wait for a message and return it; None if the other side is gone."""
        ...

    def close(self) -> None: ...


class SocketChannel:
    """A channel between two processes of one machine."""

    def __init__(self, stream: socket.socket) -> None:
        self.stream = stream

    def send(self, frame: bytes) -> None:
        self.stream.sendall(_LENGTH.pack(len(frame)) + frame)

    def receive(self) -> bytes | None:
        head = self._read(_LENGTH.size)
        return None if head is None else self._read(_LENGTH.unpack(head)[0])

    def _read(self, size: int) -> bytes | None:
        parts = bytearray()
        while len(parts) < size:
            try:
                part = self.stream.recv(size - len(parts))
            except ConnectionError:
                return None
            if not part:
                return None
            parts += part
        return bytes(parts)

    def close(self) -> None:
        self.stream.close()


class GlooChannel:
    """A channel between two ranks of a process group of gloo. Sending does not wait for the other side."""

    def __init__(self, group: Any, peer: int) -> None:
        """``peer`` is the place of the other rank in the group."""
        self._group, self._peer = group, peer
        self._unsent: deque[tuple[Any, Tensor]] = deque()

    def send(self, frame: bytes) -> None:
        data = bytearray((_LENGTH.pack(len(frame)) + frame).ljust(_PACKET_BYTES, b"\0"))
        whole = torch.frombuffer(data, dtype=torch.uint8)
        try:
            for part in (whole[:_PACKET_BYTES], whole[_PACKET_BYTES:]):
                if len(part):
                    # The bytes must live until they are sent.
                    self._unsent.append((self._group.send([part], self._peer, 0), part))
            while len(self._unsent) > _MOST_UNSENT:
                self._unsent.popleft()[0].wait(FOREVER)
        except RuntimeError as error:
            raise ConnectionResetError(first_line(error)) from error

    def receive(self) -> bytes | None:
        try:
            data = self._receive(_PACKET_BYTES)
            end = _LENGTH.size + _LENGTH.unpack_from(data)[0]
            if end > len(data):
                data += self._receive(end - len(data))
        except RuntimeError:
            return None
        return data[_LENGTH.size : end]

    def _receive(self, size: int) -> bytes:
        part = torch.empty(size, dtype=torch.uint8)
        self._group.recv([part], self._peer, 0).wait(FOREVER)
        return part.numpy().tobytes()

    def await_end(self) -> str:
        """Wait until the other side is gone, in a thread of its own, and return how that shows."""
        try:
            self._group.recv([torch.empty(1, dtype=torch.uint8)], self._peer, _NEVER_SENT).wait(FOREVER)
        except RuntimeError as error:
            return first_line(error)
        return "the connection was closed"

    def close(self) -> None:
        self._unsent.clear()
        self._group = None
