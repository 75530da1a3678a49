"""The connections between nodes: node 0 waits for the others, checks them, and each pair of ranks gets its stream.

Every connection is authenticated before a message is read from it. A connection that fails is logged and closed; it
does not end the wait, because it may come from anywhere. A node that does not fit ends the start on all nodes.
"""

import contextlib
import ipaddress
import logging
import queue
import secrets
import socket
import threading
import time
from dataclasses import dataclass, field

import msgspec

from quire_engine.config import ParallelOptions
from quire_engine.errors import EngineStartError
from quire_engine.group_secret import NotAuthenticated, accept, authenticate
from quire_engine.runner.parallel.agreement import disagreements
from quire_engine.runner.parallel.messages import (
    LONGEST_JOINING,
    Beat,
    Formed,
    Frames,
    JoinAsNode,
    JoinAsRank,
    JoinAsStream,
    Joining,
    RankRefused,
    ToNode,
    Welcome,
)
from quire_engine.runner.parallel.topology import Topology, topology_of

_log = logging.getLogger(__name__)
_HANDSHAKE_SECONDS = 10.0
_MOST_HANDSHAKES = 32
"""The connections that are authenticated at once; further ones wait in the kernel's queue."""
_RETRY_SECONDS = 0.25
_CONNECTING_SECONDS = 60.0
"""The longest time for the connections of ranks, once all nodes are there."""
_ENDED_SECONDS = 0.2
"""The time between two looks for nodes that have left while others are waited for."""

Link = tuple[int, int]
"""A stream between two ranks: the one of this node, and its peer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Connections:
    """The connections of one node after all nodes have met."""

    nodes: dict[int, Frames] = field(default_factory=dict)
    """The connection to each other node; a node other than node 0 has only that to node 0."""
    ranks: dict[int, socket.socket] = field(default_factory=dict)
    """On node 0, the connection to each rank of other nodes; elsewhere, that of each own rank to rank 0."""
    streams: dict[Link, socket.socket] = field(default_factory=dict)

    def close(self) -> None:
        for frames in self.nodes.values():
            frames.close()
        for connection in (*self.ranks.values(), *self.streams.values()):
            connection.close()


class Listener:
    """The port on which a node accepts authenticated connections, until it is closed."""

    def __init__(self, parallel: ParallelOptions, secret: bytes) -> None:
        """Listen. Raise EngineStartError if that is impossible."""
        self._secret = secret
        self.arrivals: queue.Queue[tuple[Joining, socket.socket, str]] = queue.Queue()
        self.refusal = ""
        """The last connection that was refused and why, for messages."""
        port = parallel.master_port + parallel.node_rank
        host = _bind_address(parallel.master_addr)
        try:
            self._socket = socket.create_server(
                (host, port), family=_family(host), backlog=128, dualstack_ipv6=host == "::"
            )
        except OSError as error:
            raise EngineStartError(f"--master-port {parallel.master_port}: cannot listen on {port}: {error}") from error
        self._handshakes = threading.Semaphore(_MOST_HANDSHAKES)
        self._closed = False
        threading.Thread(target=self._accept, name="group listener", daemon=True).start()

    def _accept(self) -> None:
        while True:
            self._handshakes.acquire()
            try:
                connection, address = self._socket.accept()
            except OSError as error:
                self._handshakes.release()
                if self._closed:
                    return
                _log.warning("a connection could not be accepted: %s", error)
                time.sleep(_RETRY_SECONDS)  # there may be too many open files
                continue
            threading.Thread(target=self._greet, args=(connection, address[0]), daemon=True).start()

    def _greet(self, connection: socket.socket, address: str) -> None:
        try:
            connection.settimeout(_HANDSHAKE_SECONDS)
            accept(connection, self._secret)
            frame = Frames(connection).receive(longest=LONGEST_JOINING)
            if frame is None:
                raise ConnectionResetError("the connection was closed")
            message: Joining = msgspec.msgpack.decode(frame, type=Joining)
            _prepare(connection)
            self.arrivals.put((message, connection, address))
            if self._closed:
                self._close_arrivals()
        except (NotAuthenticated, OSError, ValueError) as error:
            self.refusal = f"a connection from {address} was refused: {error}"
            _log.warning("%s", self.refusal)
            connection.close()
        finally:
            self._handshakes.release()

    def close(self) -> None:
        """Accept no more connections."""
        self._closed = True
        # A thread that waits for a connection is woken only by a shutdown.
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()
        self._close_arrivals()

    def _close_arrivals(self) -> None:
        """Close the connections that are left in the queue; handshakes may end after the listener."""
        with contextlib.suppress(queue.Empty):
            while True:
                self.arrivals.get_nowait()[1].close()


def gather(parallel: ParallelOptions, own: JoinAsNode, secret: bytes) -> Connections:
    """Wait on node 0 until all nodes have joined, and return the connections.

    Raise EngineStartError if a node does not come in time or does not fit; the nodes that are there get the reason.
    """
    listener = Listener(parallel, secret)
    nodes: dict[int, Frames] = {}
    try:
        addresses = _await_nodes(parallel, own, listener, nodes)
        session = secrets.token_hex(8)
        for frames in nodes.values():
            frames.send(Welcome(session=session, addresses=addresses))
        topology = topology_of(parallel)
        ranks = {rank for node in nodes for rank in topology.ranks_of(node)}
        links = {link for node in nodes for link in topology.links_between(0, node)}
        found = _await_connections(listener, session, ranks, links)
        return Connections(nodes=nodes, ranks=found.ranks, streams=found.streams)
    except EngineStartError as error:
        refuse_nodes(nodes, str(error), error.exit_code)
        raise
    except OSError as error:
        refuse_nodes(nodes, str(error), 1)
        raise EngineStartError(f"a node was lost while the group formed: {error}") from error
    finally:
        listener.close()


def refuse_nodes(nodes: dict[int, Frames], reason: str, exit_code: int) -> None:
    """Tell the nodes why there will be no group, and close the connections."""
    for frames in nodes.values():
        with contextlib.suppress(OSError):
            frames.send(RankRefused(message=reason, exit_code=exit_code))
        frames.close()


def _await_nodes(
    parallel: ParallelOptions, own: JoinAsNode, listener: Listener, nodes: dict[int, Frames]
) -> dict[int, str]:
    """Fill ``nodes`` and return their addresses."""
    deadline = time.monotonic() + parallel.join_timeout_seconds
    missing = set(range(1, parallel.nodes))
    addresses: dict[int, str] = {}
    _log.info("waits for %s on port %d", _named(missing), parallel.master_port)
    while missing:
        for node in [node for node, frames in nodes.items() if _has_ended(frames.stream)]:
            _log.warning("node %d (%s) left before the group formed", node, addresses[node])
            nodes.pop(node).close()
            missing.add(node)
        if (left := deadline - time.monotonic()) <= 0:
            advice = f"; {listener.refusal}" if listener.refusal else ""
            raise EngineStartError(
                f"{_named(missing)} of {parallel.nodes} did not join within {parallel.join_timeout_seconds:g} s"
                " (--distributed-timeout-seconds): start it with --node-rank, and --master-addr with this node's name"
                f"{advice}"
            )
        try:
            message, connection, address = listener.arrivals.get(timeout=min(left, _ENDED_SECONDS))
        except queue.Empty:
            continue
        if not isinstance(message, JoinAsNode):
            connection.close()  # of a group that has ended
            continue
        frames = Frames(connection)
        if problem := _place_problem(message.node, parallel.nodes, nodes, addresses):
            refuse_nodes({message.node: frames}, problem, 1)
            continue
        nodes[message.node], addresses[message.node] = frames, address
        if problems := disagreements(own, message):
            raise EngineStartError(f"node {message.node} ({address}) cannot join: {'; '.join(problems)}", 2)
        missing.discard(message.node)
        _log.info("node %d joined from %s", message.node, address)
    return addresses


def _place_problem(node: int, nodes: int, joined: dict[int, Frames], addresses: dict[int, str]) -> str | None:
    if not 0 < node < nodes:
        return f"--node-rank {node}: the group has {nodes} nodes, and node 0 is the one that listens"
    if node in joined:
        return f"--node-rank {node}: a node with this number has joined already, from {addresses[node]}"
    return None


def _await_connections(listener: Listener, session: str, ranks: set[int], links: set[Link]) -> Connections:
    """Return the connections of these ranks, and the streams of these links, as (own rank, peer)."""
    deadline = time.monotonic() + _CONNECTING_SECONDS
    found = Connections()
    while ranks - found.ranks.keys() or links - found.streams.keys():
        try:
            message, connection, _ = listener.arrivals.get(timeout=max(0.0, deadline - time.monotonic()))
        except queue.Empty:
            missing = [*sorted(ranks - found.ranks.keys()), *sorted(links - found.streams.keys())]
            raise EngineStartError(
                f"the ranks did not connect within {_CONNECTING_SECONDS:g} s; missing: {missing}"
            ) from None
        match message:
            case JoinAsRank(session=named, rank=rank) if named == session and rank in ranks:
                found.ranks[rank] = connection
            case JoinAsStream(session=named, source=peer, target=own) if named == session and (own, peer) in links:
                found.streams[own, peer] = connection
            case _:
                connection.close()
    return found


def join(parallel: ParallelOptions, own: JoinAsNode, secret: bytes) -> Connections:
    """Join the group from another node than node 0, and return the connections.

    Raise EngineStartError if node 0 does not answer in time, or refuses this node.
    """
    topology, node = topology_of(parallel), parallel.node_rank
    deadline = time.monotonic() + parallel.join_timeout_seconds
    later = [link for other in range(node + 1, parallel.nodes) for link in topology.links_between(node, other)]
    listener = Listener(parallel, secret) if later else None
    control: Frames | None = None
    try:
        control = _connect_in_time(parallel, own, secret, deadline)
        welcome = _await_welcome(control, parallel, deadline)
        joined = _connect_ranks(parallel, topology, secret, welcome)
        if listener is not None:
            joined.streams.update(_await_connections(listener, welcome.session, set(), set(later)).streams)
    except (OSError, NotAuthenticated, EngineStartError) as error:
        if control is not None:
            control.close()
        if isinstance(error, EngineStartError):
            raise
        raise EngineStartError(f"node 0 at {_shown(parallel)} was lost while the group formed: {error}") from error
    finally:
        if listener is not None:
            listener.close()
    joined.nodes[0] = control
    return joined


def _connect_in_time(parallel: ParallelOptions, own: JoinAsNode, secret: bytes, deadline: float) -> Frames:
    """Connect to node 0, which may start later."""
    _log.info("joins the group of %s as node %d", _shown(parallel), parallel.node_rank)
    while True:
        try:
            connection = _connect((parallel.master_addr, parallel.master_port), secret, own)
        except NotAuthenticated as error:
            raise EngineStartError(f"node 0 at {_shown(parallel)}: {error}", 2) from error
        except OSError as error:
            if time.monotonic() >= deadline:
                raise EngineStartError(
                    f"node 0 did not answer at {_shown(parallel)} within {parallel.join_timeout_seconds:g} s"
                    f" (--distributed-timeout-seconds): {error}; check --master-addr and --master-port, and that node 0"
                    " runs"
                ) from error
            time.sleep(_RETRY_SECONDS)
        else:
            return Frames(connection)


def _await_welcome(control: Frames, parallel: ParallelOptions, deadline: float) -> Welcome:
    # Node 0 has its own deadline, and says which node is missing.
    control.stream.settimeout(max(0.0, deadline - time.monotonic()) + _CONNECTING_SECONDS)
    try:
        frame = control.receive(longest=LONGEST_JOINING)
    except TimeoutError:
        raise EngineStartError(f"node 0 at {_shown(parallel)} did not form the group in time") from None
    control.stream.settimeout(None)
    if frame is None:
        raise EngineStartError(f"node 0 at {_shown(parallel)} ended before the group formed")
    message: Welcome | Formed | RankRefused | Beat = msgspec.msgpack.decode(frame, type=ToNode)
    if isinstance(message, RankRefused):
        raise EngineStartError(f"node 0 at {_shown(parallel)} refuses this group: {message.message}", message.exit_code)
    assert isinstance(message, Welcome), "node 0 welcomes a node first"
    return message


def _connect_ranks(parallel: ParallelOptions, topology: Topology, secret: bytes, welcome: Welcome) -> Connections:
    """Connect this node's ranks to rank 0, and to their peers on nodes before this one."""
    joined, node, session = Connections(), parallel.node_rank, welcome.session
    first = (parallel.master_addr, parallel.master_port)
    for rank in topology.ranks_of(node):
        joined.ranks[rank] = _connect(first, secret, JoinAsRank(session=session, rank=rank))
    for other in range(node):
        address = first if other == 0 else (welcome.addresses[other], parallel.master_port + other)
        for rank, peer in topology.links_between(node, other):
            message = JoinAsStream(session=session, source=rank, target=peer)
            joined.streams[rank, peer] = _connect(address, secret, message)
    return joined


def _connect(address: tuple[str, int], secret: bytes, message: msgspec.Struct) -> socket.socket:
    connection = socket.create_connection(address, timeout=_HANDSHAKE_SECONDS)
    try:
        authenticate(connection, secret)
        Frames(connection).send(message)
    except BaseException:
        connection.close()
        raise
    _prepare(connection)
    return connection


def _prepare(connection: socket.socket) -> None:
    connection.settimeout(None)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)


def _has_ended(connection: socket.socket) -> bool:
    try:
        return not connection.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
    except BlockingIOError:
        return False
    except OSError:
        return True


def _bind_address(master_addr: str) -> str:
    """Return the address to listen on: only this machine if the group is on it, else every address."""
    if master_addr == "localhost":
        return "127.0.0.1"
    try:
        address = ipaddress.ip_address(master_addr)
    except ValueError:
        return "::" if socket.has_dualstack_ipv6() else "0.0.0.0"
    if address.is_loopback:
        return master_addr
    return "0.0.0.0" if address.version == 4 else "::"


def _family(host: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in host else socket.AF_INET


def _shown(parallel: ParallelOptions) -> str:
    return f"{parallel.master_addr}:{parallel.master_port}"


def _named(nodes: set[int]) -> str:
    return f"node{'s' if len(nodes) > 1 else ''} {', '.join(map(str, sorted(nodes)))}"
