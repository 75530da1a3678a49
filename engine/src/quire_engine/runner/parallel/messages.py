"""The messages between rank 0 and the other ranks, and between nodes: frames of MessagePack over a stream socket."""

import socket
import struct
import threading
from typing import Any

import msgspec

from quire_engine.core.batch import Batch, RunnerOutput, TokenMasks
from quire_engine.runner.cache_size import CacheSize
from quire_engine.runner.device_budget import DeviceUse
from quire_engine.runner.memory import AvailableMemory

_LENGTH = struct.Struct("<I")

# --- rank 0 -> another rank ---


class Begin(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The first message: the device and the arithmetic that rank 0 has chosen for all ranks."""

    gpu: str | None
    """The name of rank 0's GPU; None if it computes on a CPU."""
    dtype: str
    backend: str


class MeasureMemory(msgspec.Struct, frozen=True, tag=True):
    """A question for the memory of the rank's node, which ``Memory`` answers."""


class Connect(msgspec.Struct, frozen=True, tag=True):
    """A command to ranks on GPUs: all of them have their weights, and now meet each other."""


class MeasureDevice(msgspec.Struct, frozen=True, tag=True):
    """A command to run the largest step together and to measure the GPU's memory, which ``MeasuredMemory`` answers."""


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
    """A rank cannot load its part of the model, or a node cannot be in the group."""

    message: str
    exit_code: int


class Memory(msgspec.Struct, frozen=True, tag=True):
    """The memory that is left on a node after all its ranks have their weights; None if it is unknown."""

    available: AvailableMemory | None


class MeasuredMemory(msgspec.Struct, frozen=True, tag=True):
    """The memory of the rank's GPU."""

    use: DeviceUse


class Sampled(msgspec.Struct, frozen=True, tag=True):
    output: RunnerOutput


# --- between nodes ---


class JoinAsNode(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The first message of a node to node 0: what must be the same on all nodes."""

    node: int
    version: str
    model: str
    """The digest of the model's configuration and of the index of its tensors."""
    settings: dict[str, Any]
    """The options that must be the same, by name."""


class JoinAsRank(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The first message of the connection over which a rank gets its batches."""

    session: str
    rank: int


class JoinAsStream(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The first message of the connection over which two ranks exchange data."""

    session: str
    source: int
    """The rank on the node that connects."""
    target: int


class Welcome(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """All nodes are there. Connections of this group name the session."""

    session: str
    addresses: dict[int, str]
    """The addresses of the nodes other than node 0."""


class Formed(msgspec.Struct, frozen=True, tag=True):
    """All ranks are ready to run batches."""


class Beat(msgspec.Struct, frozen=True, tag=True):
    """A sign of life."""


ToRank = Begin | MeasureMemory | Connect | MeasureDevice | Allocate | StepMessage | Sample
FromRank = Loaded | RankRefused | Memory | MeasuredMemory | Sampled
Joining = JoinAsNode | JoinAsRank | JoinAsStream
ToNode = Welcome | Formed | RankRefused | Beat

_ENCODER = msgspec.msgpack.Encoder()
LONGEST_JOINING = 1 << 16
"""The longest frame in bytes before a node has joined."""


class Frames:
    """Whole messages over a stream socket."""

    def __init__(self, stream: socket.socket) -> None:
        self.stream = stream
        self._sending = threading.Lock()

    def send(self, message: msgspec.Struct) -> None:
        """Send a message. Raise OSError if the other side is gone."""
        self.send_encoded(encode(message))

    def send_encoded(self, frame: bytes) -> None:
        """Send a message that is encoded already. Raise OSError if the other side is gone."""
        with self._sending:
            self.stream.sendall(_LENGTH.pack(len(frame)) + frame)

    def receive(self, *, longest: int | None = None) -> bytes | None:
        """Return the next frame; None if the other side is gone. Raise ValueError if it is longer than ``longest``."""
        head = self._read(_LENGTH.size)
        if head is None:
            return None
        (size,) = _LENGTH.unpack(head)
        if longest is not None and size > longest:
            raise ValueError(f"a frame of {size} bytes")
        return self._read(size)

    def close(self) -> None:
        self.stream.close()

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


def encode(message: msgspec.Struct) -> bytes:
    """Return the bytes of a message."""
    return _ENCODER.encode(message)
