"""The engine process's socket to the API process."""

import os
from contextlib import suppress

import msgspec
import zmq

from quire_engine.ipc.messages import FromEngine, ToEngine

LAST_WORDS_MILLISECONDS = 2000


class Channel:
    """The socket to the API process. Sending never blocks: unread messages stay in memory."""

    def __init__(self, address: str) -> None:
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.DEALER)
        self._socket.set(zmq.SNDHWM, 0)
        self._socket.set(zmq.RCVHWM, 0)
        self._socket.set(zmq.LINGER, LAST_WORDS_MILLISECONDS)
        self._socket.connect(address)
        self._woken, self._waker = os.pipe()
        os.set_blocking(self._woken, False)
        os.set_blocking(self._waker, False)
        self._poller = zmq.Poller()
        self._poller.register(self._socket, zmq.POLLIN)
        self._poller.register(self._woken, zmq.POLLIN)
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder = msgspec.msgpack.Decoder(ToEngine)

    def send(self, message: FromEngine) -> None:
        self._socket.send(self._encoder.encode(message))

    def wait(self) -> None:
        """Wait until there is a message to receive, or another thread calls ``wake``."""
        self._poller.poll(None)
        with suppress(BlockingIOError):
            os.read(self._woken, 4096)

    def wake(self) -> None:
        """End a ``wait``, or the next one."""
        with suppress(BlockingIOError):  # so many calls are unread that one more changes nothing
            os.write(self._waker, b"\0")

    def receive(self) -> ToEngine | None:
        try:
            frame = self._socket.recv(zmq.NOBLOCK)
        except zmq.Again:
            return None
        message: ToEngine = self._decoder.decode(frame)
        return message

    def close(self) -> None:
        self._socket.close()
        self._context.term()
        os.close(self._woken)
        os.close(self._waker)
