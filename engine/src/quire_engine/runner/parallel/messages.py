"""The messages between rank 0 and another rank: frames of MessagePack over a socket, after one line of JSON."""

import socket
import struct

import msgspec

from quire_engine.config import EngineConfig
from quire_engine.core.batch import Batch
from quire_engine.core.kv_layout import KVCacheLayout

_LENGTH = struct.Struct("<I")


class Begin(msgspec.Struct, frozen=True, kw_only=True):
    """The first message of rank 0: what to load, and the arithmetic that rank 0 has chosen for all ranks."""

    config: EngineConfig
    dtype: str
    backend: str


class Allocate(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The KV cache to allocate, and from which number of tokens steps are shared among the threads of a rank."""

    layout: KVCacheLayout
    max_model_len: int
    shared_asleep: int
    shared_spinning: int


class Step(msgspec.Struct, frozen=True, tag=True):
    """A batch to run, without what only sampling needs."""

    batch: Batch


class Loaded(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """A rank has its weights in memory."""

    weight_bytes: int


class Refused(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """A rank cannot load its part of the model."""

    message: str
    exit_code: int


ToRank = Allocate | Step
FromRank = Loaded | Refused


class Frames:
    """Whole messages over a stream socket."""

    def __init__(self, stream: socket.socket) -> None:
        self._stream = stream

    def send(self, frame: bytes) -> None:
        """Send a frame. Raise OSError if the other side is gone."""
        self._stream.sendall(_LENGTH.pack(len(frame)) + frame)

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
        self._stream.close()

    def _read(self, size: int) -> bytes | None:
        parts = bytearray()
        while len(parts) < size:
            try:
                part = self._stream.recv(size - len(parts))
            except ConnectionError:
                return None
            if not part:
                return None
            parts += part
        return bytes(parts)
