"""Loopback ports for servers that must be able to restart on the same port."""

import random
import socket
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Final

# Below the range that the kernel takes ports for outgoing connections from (32768 and up): while a server is down, a
# client that keeps trying its address could otherwise be given that very port, and connect to itself.
CANDIDATES: Final = range(20_000, 32_768)


def free_ports(count: int) -> tuple[int, ...]:
    """Return different free ports."""
    with ExitStack() as held:
        candidates = _shuffled()
        return tuple(next(port for port in candidates if _hold(port, held)) for _ in range(count))


def _shuffled() -> Iterator[int]:
    yield from random.sample(CANDIDATES, len(CANDIDATES))


def _hold(port: int, held: ExitStack) -> bool:
    listener = socket.socket()
    try:
        listener.bind(("127.0.0.1", port))
    except OSError:
        listener.close()
        return False
    held.enter_context(listener)
    return True
