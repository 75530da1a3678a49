"""The side of a worker process: frames come on its standard input, and each is answered by one on standard output.

The process ends with its input, so that it never outlives the server.
"""

import os
import queue
import resource
import sys
import threading
from collections.abc import Callable
from typing import BinaryIO

import msgspec

LENGTH_BYTES = 8
_encode = msgspec.json.Encoder(decimal_format="number").encode


def frame(message: msgspec.Struct) -> bytes:
    """Return a message as JSON with its length before it."""
    body = _encode(message)
    return len(body).to_bytes(LENGTH_BYTES, "big") + body


def bound_memory(num_bytes: int) -> None:
    """Bound the address space of this process."""
    resource.setrlimit(resource.RLIMIT_AS, (num_bytes, num_bytes))


def answer_frames(set_up: Callable[[bytes], Callable[[bytes], msgspec.Struct]], ready: msgspec.Struct) -> None:
    """Answer frames until the input ends. The first one is for ``set_up``, which returns what answers the others."""
    # A library must not write between the frames.
    output = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    respond = set_up(_read_frame(sys.stdin.buffer))
    frames: queue.SimpleQueue[bytes] = queue.SimpleQueue()
    # A thread of its own notices the end of the input also while a frame is answered.
    threading.Thread(target=_read_frames, args=(frames,), daemon=True).start()
    answer = ready
    while True:
        output.write(frame(answer))
        output.flush()
        answer = respond(frames.get())


def _read_frames(frames: "queue.SimpleQueue[bytes]") -> None:
    while True:
        try:
            frames.put(_read_frame(sys.stdin.buffer))
        except EOFError:
            os._exit(0)


def _read_frame(stream: BinaryIO) -> bytes:
    head = stream.read(LENGTH_BYTES)
    body = stream.read(int.from_bytes(head, "big"))
    if len(head) < LENGTH_BYTES or len(body) < int.from_bytes(head, "big"):
        raise EOFError
    return body
