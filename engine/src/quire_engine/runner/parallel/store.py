"""The store of a group: a TCPStore of torch.distributed on node 0, to which the nodes and their ranks connect.

torch's own limits of time do not hold where the other side is stopped, or is another program, so that every call has a
thread, which is left behind if it does not return.
"""

import contextlib
import ipaddress
import re
import secrets
import socket
import threading
from collections.abc import Callable
from datetime import timedelta
from typing import TypeVar

import msgspec
from torch._C._distributed_c10d import PrefixStore, Store, TCPStore

from quire_engine.config import ParallelOptions
from quire_engine.errors import EngineError, EngineStartError

Value = TypeVar("Value")
_LOOPBACK = "127.0.0.1"
_CONNECT_SECONDS = 30.0


class StoreLost(EngineError):
    """The process with the store is gone, does not answer, or is another program."""


class StorePlace(msgspec.Struct, frozen=True, kw_only=True):
    """Where the processes of one machine find the store of their group."""

    host: str
    """The address of node 0."""
    port: int
    session: str
    """The prefix of this group's keys, a random number."""
    own: str
    """The address of this machine on which the libraries of its ranks listen."""

    def connect(self) -> Store:
        """Return torch's store with the keys of this group. Raise StoreLost if node 0 is gone."""
        return PrefixStore(self.session, _connect(self.host, self.port, _CONNECT_SECONDS))


class GroupStore:
    """The store as the process that watches over a node uses it. Every call may raise StoreLost."""

    def __init__(self, store: Store, place: StorePlace, silence_seconds: float) -> None:
        """``silence_seconds`` is the longest time to wait for an answer."""
        self._store = store
        self._seconds = silence_seconds
        self.place = place

    def session(self, session: str, silence_seconds: float, *, own: str | None = None) -> "GroupStore":
        """Return the store with the keys of a group, whose libraries listen on the address ``own``."""
        place = msgspec.structs.replace(self.place, session=session, own=own or self.place.own)
        return GroupStore(PrefixStore(session, self._store), place, silence_seconds)

    def set(self, key: str, value: bytes) -> None:
        # torch passes on an object of bytes as it is.
        within(self._seconds, lambda: self._store.set(key, value))  # type: ignore[arg-type]

    def get(self, key: str) -> bytes:
        """Wait for a key, and return its value."""
        return within(self._seconds, lambda: self._store.get(key))

    def add(self, key: str, amount: int) -> int:
        """Add to a number, which is 0 at first, and return the sum."""
        return within(self._seconds, lambda: self._store.add(key, amount))

    def has(self, key: str) -> bool:
        return within(self._seconds, lambda: self._store.check([key]))


def within(seconds: float, call: Callable[[], Value]) -> Value:
    """Return what ``call`` returns. Raise StoreLost if it fails, or does not return in time."""
    found: list[Value] = []
    failures: list[str] = []

    def run() -> None:
        try:
            found.append(call())
        except (RuntimeError, ValueError) as error:
            failures.append(first_line(error))

    thread = threading.Thread(target=run, name="group store", daemon=True)
    thread.start()
    thread.join(seconds)
    if found:
        return found[0]
    raise StoreLost(failures[0] if failures else f"there was no answer for {seconds:g} s")


def first_line(error: Exception) -> str:
    """Return the message of an error of torch or gloo, without the places in their code and their advice."""
    return re.sub(r"^\[\S+\] ", "", str(error).partition("\n")[0]).partition(". This is typically")[0]


def host_store(parallel: ParallelOptions | None = None) -> GroupStore:
    """Return the store of a group that this process hosts, for one machine if ``parallel`` is None.

    Raise EngineStartError if it cannot listen.
    """
    host, port = (_LOOPBACK, 0) if parallel is None else (_bind_address(parallel.master_addr), parallel.master_port)
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        listening = socket.create_server((host, port), family=family, backlog=128, dualstack_ipv6=host == "::")
    except OSError as error:
        raise EngineStartError(f"--master-port {port}: cannot listen on {port}: {error}") from error
    port = listening.getsockname()[1]
    own = host if ipaddress.ip_address(host).is_loopback else _LOOPBACK
    store = TCPStore(own, port, is_master=True, wait_for_workers=False, master_listen_fd=listening.detach())
    place = StorePlace(host=own, port=port, session=secrets.token_hex(16), own=own)
    if parallel is None:
        return GroupStore(store, place, _CONNECT_SECONDS).session(place.session, _CONNECT_SECONDS)
    return GroupStore(store, place, _CONNECT_SECONDS)


def join_store(address: str, port: int) -> GroupStore:
    """Return the store that node 0 hosts. Raise StoreLost, or OSError if no process listens there."""
    with socket.create_connection((address, port), timeout=_CONNECT_SECONDS) as reached:
        host, own = reached.getpeername()[0], reached.getsockname()[0]
    store = _connect(host, port, _CONNECT_SECONDS)
    return GroupStore(store, StorePlace(host=host, port=port, session="", own=own), _CONNECT_SECONDS)


def _connect(host: str, port: int, seconds: float) -> TCPStore:
    return within(seconds, lambda: TCPStore(host, port, timeout=timedelta(seconds=seconds)))


def address_towards(other: str) -> str:
    """Return the address of this machine from which it reaches another one."""
    family = socket.AF_INET6 if ":" in other else socket.AF_INET
    with contextlib.suppress(OSError), socket.socket(family, socket.SOCK_DGRAM) as asking:
        asking.connect((other, 9))  # this sends nothing
        return str(asking.getsockname()[0])
    return other


def _bind_address(master_addr: str) -> str:
    """Return the address to listen on: only this machine if the group is on it, else every address."""
    if master_addr == "localhost":
        return _LOOPBACK
    try:
        address = ipaddress.ip_address(master_addr)
    except ValueError:
        return "::" if socket.has_dualstack_ipv6() else "0.0.0.0"
    if address.is_loopback:
        return master_addr
    return "0.0.0.0" if address.version == 4 else "::"
