"""The rendezvous of the nodes of a group: each announces itself in the store of node 0, which answers.

A node proves with what it says that it knows the group's secret, and so does node 0 with its answer. A node that does
not is refused, and does not end the wait, because it may be of another group. A node that would run something else ends
the start on all nodes.
"""

import contextlib
import logging
import secrets
import time
from collections.abc import Iterable
from dataclasses import dataclass, field

import msgspec

from quire_engine.config import ParallelOptions
from quire_engine.errors import EngineStartError
from quire_engine.group_secret import NotAuthenticated, sign, verify
from quire_engine.runner.parallel.agreement import Membership, disagreements
from quire_engine.runner.parallel.store import GroupStore, StoreLost, address_towards, host_store, join_store

_log = logging.getLogger(__name__)
_GREETING = b"quire-group 2\n"
_NONCE_BYTES = 32
_LONGEST_JOIN = 1 << 16
_POLL_SECONDS = 0.2
_GONE_SECONDS = 5.0
"""A node that waits for the others shows more often than this that it is still there."""
_READ_SECONDS = 3.0
"""The longest time for which node 0 lets the others read why there is no group."""
_PROGRESS_SECONDS = 30.0


class Join(msgspec.Struct, frozen=True, kw_only=True):
    """The announcement of a node to node 0."""

    nonce: bytes
    address: str
    membership: Membership


class Answer(msgspec.Struct, frozen=True, kw_only=True):
    """The answer of node 0 to a node."""

    session: str = ""
    """The prefix of the group's keys; empty if there is a refusal."""
    refusal: str = ""
    exit_code: int = 1


@dataclass(slots=True, kw_only=True)
class Attempt:
    """A node that has announced itself under a number of its own."""

    number: int
    join: Join
    arrived: float
    seen: float
    """When it showed last that it is still there."""
    signs: int = 0

    @property
    def node(self) -> int:
        return self.join.membership.node


@dataclass(slots=True)
class Places:
    """The nodes that have joined, and those that want to."""

    nodes: int
    taken: dict[int, Attempt] = field(default_factory=dict)
    waiting: list[Attempt] = field(default_factory=list)

    @property
    def missing(self) -> list[int]:
        return [node for node in range(1, self.nodes) if node not in self.taken]

    def leave(self, now: float) -> list[Attempt]:
        """Free the places of nodes that are not there any more, and return them."""
        gone = [attempt for attempt in self.taken.values() if now - attempt.seen > _GONE_SECONDS]
        for attempt in gone:
            del self.taken[attempt.node]
        self.waiting = [attempt for attempt in self.waiting if now - attempt.seen <= _GONE_SECONDS]
        return gone

    def settle(self) -> tuple[list[Attempt], list[tuple[Attempt, str]]]:
        """Return those that have got their places, and those that cannot have them and why.

        A place that is taken may be that of a node that has started again: its first attempt decides, when it shows
        that it is still there or does not.
        """
        joined, refused, undecided = [], [], []
        for attempt in self.waiting:
            node, holder = attempt.node, self.taken.get(attempt.node)
            if not 0 < node < self.nodes:
                reason = f"--node-rank {node}: the group has {self.nodes} nodes, and node 0 is the one that listens"
                refused.append((attempt, reason))
            elif holder is None:
                self.taken[node] = attempt
                joined.append(attempt)
            elif holder.seen > attempt.arrived:
                address = holder.join.address
                reason = f"--node-rank {node}: a node with this number has joined already, from {address}"
                refused.append((attempt, reason))
            else:
                undecided.append(attempt)
        self.waiting = undecided
        return joined, refused


def gather(parallel: ParallelOptions, own: Membership, secret: bytes, silence_seconds: float) -> GroupStore:
    """Host the store on node 0 and return it when all nodes have joined.

    Raise EngineStartError if a node does not come in time or does not fit; the nodes that are there get the reason.
    """
    gathering = _Gathering(parallel, own, secret)
    try:
        gathering.run()
        return gathering.welcome(silence_seconds)
    except EngineStartError as error:
        gathering.refuse(str(error), error.exit_code)
        raise
    except StoreLost as error:
        raise EngineStartError(f"this node's own store of the group failed: {error}") from error


class _Gathering:
    """The wait of node 0 for the others."""

    def __init__(self, parallel: ParallelOptions, own: Membership, secret: bytes) -> None:
        self._parallel, self._own, self._secret = parallel, own, secret
        self._places = Places(parallel.nodes)
        self._store = host_store(parallel)
        self._challenge = secrets.token_bytes(_NONCE_BYTES)
        self._store.set("challenge", _GREETING + self._challenge)
        self._read = 0
        self._refusal = ""

    def run(self) -> None:
        """Return when all nodes have joined."""
        parallel, places = self._parallel, self._places
        began = told = time.monotonic()
        _log.info("waits for %s on port %d", named(places.missing), parallel.master_port)
        while places.missing:
            now = time.monotonic()
            self._look(now)
            self._settle(now)
            if not places.missing:
                return
            if now - began >= parallel.join_timeout_seconds:
                advice = f"; {self._refusal}" if self._refusal else ""
                raise EngineStartError(
                    f"{named(places.missing)} of {parallel.nodes} did not join within"
                    f" {parallel.join_timeout_seconds:g} s (--distributed-timeout-seconds): start it with --node-rank,"
                    f" and --master-addr with this node's name{advice}"
                )
            if now - told >= _PROGRESS_SECONDS:
                told = now
                _log.info("still waits for %s, since %.0f s", named(places.missing), now - began)
            time.sleep(_POLL_SECONDS)

    def _look(self, now: float) -> None:
        """Find out which nodes have come, and which are still there."""
        for attempt in (*self._places.taken.values(), *self._places.waiting):
            signs = self._store.add(f"there/{attempt.number}", 0)
            if signs != attempt.signs:
                attempt.signs, attempt.seen = signs, now
        while self._store.has(f"join/{self._read + 1}"):
            self._read += 1
            self._accept(self._read, self._store.get(f"join/{self._read}"), now)

    def _accept(self, number: int, said: bytes, now: float) -> None:
        try:
            if len(said) > _LONGEST_JOIN:
                raise ValueError(f"it sent {len(said)} bytes")
            join = msgspec.msgpack.decode(
                verify(self._secret, said, role=b"joins", challenge=self._challenge), type=Join
            )
        except (NotAuthenticated, ValueError) as error:
            self._refusal = f"a node was refused: {error}"
            _log.warning("%s", self._refusal)
            # Without a proof, because it would not be that of the other secret.
            self._store.set(f"answer/{number}", b"")
            return
        self._places.waiting.append(Attempt(number=number, join=join, arrived=now, seen=now))

    def _settle(self, now: float) -> None:
        places = self._places
        for attempt in places.leave(now):
            _log.warning("node %d (%s) left before the group formed", attempt.node, attempt.join.address)
        joined, refused = places.settle()
        for attempt, reason in refused:
            _log.warning("a node from %s was refused: %s", attempt.join.address, reason)
            self._answer(attempt, Answer(refusal=reason))
        for attempt in joined:
            if problems := disagreements(self._own, attempt.join.membership):
                who = f"node {attempt.node} ({attempt.join.address})"
                raise EngineStartError(f"{who} cannot join: {'; '.join(problems)}", 2)
            rest = f"; waits for {named(places.missing)}" if places.missing else ""
            _log.info("node %d joined from %s%s", attempt.node, attempt.join.address, rest)

    def _answer(self, attempt: Attempt, answer: Answer) -> None:
        challenge = self._challenge + attempt.join.nonce
        said = sign(self._secret, msgspec.msgpack.encode(answer), role=b"answers", challenge=challenge)
        self._store.set(f"answer/{attempt.number}", said)

    def refuse(self, reason: str, exit_code: int) -> None:
        """Let the nodes that are there know why there will be no group."""
        taken = self._places.taken.values()
        with contextlib.suppress(StoreLost):
            for attempt in taken:
                self._answer(attempt, Answer(refusal=reason, exit_code=exit_code))
            wait_until_read(self._store, [f"read/{attempt.number}" for attempt in taken])

    def welcome(self, silence_seconds: float) -> GroupStore:
        """Let the nodes know that the group is complete."""
        session = secrets.token_hex(16)
        taken = self._places.taken
        for attempt in taken.values():
            self._answer(attempt, Answer(session=session))
        self._store.set("complete", b"1")
        own = address_towards(taken[1].join.address)
        return self._store.session(session, silence_seconds, own=own)


def wait_until_read(store: GroupStore, keys: Iterable[str]) -> None:
    """Wait until other nodes have read their answers, and set these keys; give up after some seconds."""
    deadline = time.monotonic() + _READ_SECONDS
    for key in keys:
        while not store.has(key) and time.monotonic() < deadline:
            time.sleep(_POLL_SECONDS / 4)


def join(parallel: ParallelOptions, own: Membership, secret: bytes, silence_seconds: float) -> GroupStore:
    """Join the group from another node than node 0, and return its store.

    Raise EngineStartError if node 0 does not answer in time, or refuses this node.
    """
    began = told = time.monotonic()
    deadline = began + parallel.join_timeout_seconds
    where = f"{parallel.master_addr}:{parallel.master_port}"
    _log.info("joins the group of %s as node %d", where, parallel.node_rank)
    while True:
        try:
            return _try_to_join(parallel, own, secret, silence_seconds)
        except (NotAuthenticated, EngineStartError) as error:
            exit_code = error.exit_code if isinstance(error, EngineStartError) else 2
            raise EngineStartError(f"node 0 at {where}: {error}", exit_code) from error
        except (OSError, StoreLost) as error:
            # It may start later, or have been of a group that has ended.
            now = time.monotonic()
            if now >= deadline:
                raise EngineStartError(
                    f"node 0 did not answer at {where} within {parallel.join_timeout_seconds:g} s"
                    f" (--distributed-timeout-seconds): {error}; check --master-addr and --master-port, and that node 0"
                    " runs"
                ) from error
            if now - told >= _PROGRESS_SECONDS:
                told = now
                _log.info("still waits for node 0 at %s, since %.0f s: %s", where, now - began, error)
            time.sleep(_POLL_SECONDS)


def _try_to_join(parallel: ParallelOptions, own: Membership, secret: bytes, silence_seconds: float) -> GroupStore:
    store = join_store(parallel.master_addr, parallel.master_port)
    greeting = store.get("challenge")
    if not greeting.startswith(_GREETING):
        raise EngineStartError("another version of quire-engine listens there", 2)
    challenge, nonce = greeting[len(_GREETING) :], secrets.token_bytes(_NONCE_BYTES)
    said = msgspec.msgpack.encode(Join(nonce=nonce, address=store.place.own, membership=own))
    number = store.add("joins", 1)
    store.set(f"join/{number}", sign(secret, said, role=b"joins", challenge=challenge))
    signed = _await_answer(store, number, parallel.node_rank)
    if not signed:
        raise NotAuthenticated("it has another group secret and refuses this one")
    said = verify(secret, signed, role=b"answers", challenge=challenge + nonce)
    answer = msgspec.msgpack.decode(said, type=Answer)
    store.set(f"read/{number}", b"1")
    if answer.refusal:
        raise EngineStartError(f"it refuses this group: {answer.refusal}", answer.exit_code)
    return store.session(answer.session, silence_seconds)


def _await_answer(store: GroupStore, number: int, node: int) -> bytes:
    """Return the answer of node 0, which knows how long to wait for the other nodes.

    Raise StoreLost if it is gone, or does not wait for nodes any more.
    """
    while True:
        complete = store.has("complete")
        if store.has(f"answer/{number}"):
            break
        if complete:
            raise StoreLost(f"its group is complete, and another node has joined with --node-rank {node}")
        store.add(f"there/{number}", 1)
        time.sleep(_POLL_SECONDS)
    return store.get(f"answer/{number}")


def named(nodes: list[int]) -> str:
    return f"node{'s' if len(nodes) > 1 else ''} {', '.join(map(str, sorted(nodes)))}"
