"""The key-value store through which ranks on GPUs find each other: rank 0 keeps it, and the others ask rank 0.

torch.distributed exchanges there what NCCL needs to connect GPUs: an identifier with a random number, and addresses.
Its own store over TCP accepts everybody. This one uses the connections that the ranks already have: sockets that the
process which starts them has opened, or, between nodes, connections that began with a proof of the group's secret.
"""

import contextlib
import socket
import threading
from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import Any, Literal

import msgspec
from torch.distributed.distributed_c10d import Store

from quire_engine.runner.parallel.messages import Frames

_LONGEST_REQUEST = 1 << 20


class StoreFailed(RuntimeError):
    """A key did not appear in time, or rank 0 is gone."""


class Values:
    """The content of the store, on rank 0."""

    def __init__(self) -> None:
        self._values: dict[str, bytes] = {}
        self._changed = threading.Condition()

    def set(self, key: str, value: bytes) -> None:
        with self._changed:
            self._values[key] = value
            self._changed.notify_all()

    def add(self, key: str, amount: int) -> int:
        """Add to a number, which is 0 at first, and return the sum."""
        with self._changed:
            total = int(self._values.get(key, b"0")) + amount
            self._values[key] = str(total).encode()
            self._changed.notify_all()
            return total

    def compare_set(self, key: str, expected: bytes, value: bytes) -> bytes:
        """Set a key whose value is ``expected``, or that does not exist if that is empty; return the value it has."""
        with self._changed:
            found = self._values.get(key, b"")
            if found == expected:
                self._values[key] = found = value
                self._changed.notify_all()
            return found or expected

    def wait(self, keys: Sequence[str], seconds: float) -> None:
        """Wait until all keys exist. Raise StoreFailed if they do not in time."""
        with self._changed:
            if not self._changed.wait_for(lambda: all(key in self._values for key in keys), seconds):
                missing = [key for key in keys if key not in self._values]
                raise StoreFailed(f"a rank did not connect within {seconds:g} s (waited for {', '.join(missing)})")

    def get(self, key: str, seconds: float) -> bytes:
        """Wait for a key and return its value. Raise StoreFailed if it does not exist in time."""
        self.wait([key], seconds)
        with self._changed:
            return self._values[key]

    def has(self, keys: Sequence[str]) -> bool:
        with self._changed:
            return all(key in self._values for key in keys)

    def delete(self, key: str) -> bool:
        with self._changed:
            return self._values.pop(key, None) is not None

    def count(self) -> int:
        with self._changed:
            return len(self._values)


class StoreRequest(msgspec.Struct, frozen=True):
    """A call of one of the methods of ``Values`` by another rank; the answer is a MessagePack value."""

    method: Literal["set", "add", "compare_set", "get", "wait", "has", "delete", "count"]
    arguments: list[Any] = []


Value = bytes | int | bool | None


class StoreAnswer(msgspec.Struct, frozen=True):
    value: Value = None
    failure: str | None = None


def answer(values: Values, request: StoreRequest) -> Value:
    """Return the answer to a request. Raise StoreFailed if it is not possible in time."""
    found: Value = getattr(values, request.method)(*request.arguments)
    return found


class RankStore(Store):
    """A ``torch.distributed.Store``. torch calls the methods with its own names, in any thread."""

    def __init__(self, connections: Mapping[int, socket.socket]) -> None:
        """Use the connections to other ranks, which are closed by ``close``.

        Rank 0 has one to each other rank, and answers in a thread for each; another rank has one, to rank 0.
        """
        super().__init__()
        self.wait_seconds = 600.0
        """The longest time to wait for a key if torch names none."""
        self._connections = [Frames(connection) for connection in connections.values()]
        self._values: Values | None = None
        self._asking = threading.Lock()
        if 0 in connections:
            return
        self._values = values = Values()
        for rank, frames in zip(connections, self._connections, strict=True):
            name = f"store for rank {rank}"
            threading.Thread(target=_serve, args=(values, frames), name=name, daemon=True).start()

    def _ask(self, request: StoreRequest) -> Any:
        if self._values is not None:
            return answer(self._values, request)
        (frames,) = self._connections
        with self._asking:
            try:
                frames.send(request)
                frame = frames.receive()
            except OSError as error:
                raise StoreFailed(f"rank 0 is gone: {error}") from error
        if frame is None:
            raise StoreFailed("rank 0 is gone")
        found = msgspec.msgpack.decode(frame, type=StoreAnswer)
        if found.failure is not None:
            raise StoreFailed(found.failure)
        return found.value

    def set(self, key: str, value: str | bytes) -> None:
        self._ask(StoreRequest("set", [key, _as_bytes(value)]))

    def get(self, key: str) -> bytes:
        found: bytes = self._ask(StoreRequest("get", [key, self.wait_seconds]))
        return found

    def add(self, key: str, amount: int) -> int:
        found: int = self._ask(StoreRequest("add", [key, amount]))
        return found

    def compare_set(self, key: str, expected: str | bytes, value: str | bytes) -> bytes:
        found: bytes = self._ask(StoreRequest("compare_set", [key, _as_bytes(expected), _as_bytes(value)]))
        return found

    def check(self, keys: list[str]) -> bool:
        return bool(self._ask(StoreRequest("has", [list(keys)])))

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        seconds = self.wait_seconds if timeout is None else timeout.total_seconds()
        self._ask(StoreRequest("wait", [list(keys), seconds]))

    def deleteKey(self, key: str) -> bool:
        return bool(self._ask(StoreRequest("delete", [key])))

    def getNumKeys(self) -> int:
        return int(self._ask(StoreRequest("count")))

    def clone(self) -> "RankStore":
        return self

    def close(self) -> None:
        """Close the connections, which ends what waits for an answer."""
        for frames in self._connections:
            with contextlib.suppress(OSError):  # the other side may have closed it
                frames.stream.shutdown(socket.SHUT_RDWR)
            frames.close()


def _as_bytes(value: str | bytes) -> bytes:
    return value.encode() if isinstance(value, str) else bytes(value)


def _serve(values: Values, frames: Frames) -> None:
    """Answer the requests of one rank until its connection ends."""
    decoder = msgspec.msgpack.Decoder(StoreRequest)
    with contextlib.suppress(OSError, ValueError, TypeError):
        while (frame := frames.receive(longest=_LONGEST_REQUEST)) is not None:
            try:
                reply = StoreAnswer(value=answer(values, decoder.decode(frame)))
            except StoreFailed as error:
                reply = StoreAnswer(failure=str(error))
            frames.send(reply)
