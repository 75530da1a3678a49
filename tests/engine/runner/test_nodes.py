"""Nodes form a group: they prove that they share a secret, agree on what they run, and get their connections."""

import socket
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from quire_cluster.ports import consecutive_free_ports
from quire_common.errors import FlagsError
from quire_engine.config import CacheOptions, EngineConfig, ParallelOptions
from quire_engine.errors import EngineStartError
from quire_engine.group_secret import NotAuthenticated, accept, authenticate, read_secret
from quire_engine.runner.parallel.agreement import disagreements, membership, model_digest
from quire_engine.runner.parallel.meeting import Connections, gather, join
from quire_engine.runner.parallel.messages import Beat, Frames, JoinAsNode
from quire_engine.runner.parallel.node_watch import NodeWatch
from quire_engine.runner.parallel.topology import Topology

SECRET = b"a secret of some length"
OTHER = b"another secret, as long"
HELLO = JoinAsNode(node=0, version="1", model="m", settings={"cache.block_size": 16})


# --- the places of ranks ---


@pytest.mark.parametrize("sizes", [(1, 2, 1), (2, 2, 1), (2, 2, 2), (4, 1, 2), (2, 4, 4), (4, 2, 4), (1, 3, 3)])
def test_streams_join_exactly_the_ranks_that_exchange_data(sizes: tuple[int, int, int]) -> None:
    tensor, stages, nodes = sizes
    topology = Topology(tensor=tensor, stages=stages, nodes=nodes)
    assert [rank for node in range(nodes) for rank in topology.ranks_of(node)] == list(range(topology.ranks))
    pairs = {(rank, peer) for rank in range(topology.ranks) for peer in topology.peers(rank)}
    assert pairs == {(peer, rank) for rank, peer in pairs}, "both sides know a stream"
    for rank in range(topology.ranks):
        assert topology.part(rank).stage == rank // tensor
        group = topology.tensor_group(rank)
        apart = topology.node_of(group[0]) != topology.node_of(group[-1])
        assert topology.shares_memory(rank) is (tensor > 1 and not apart)
        for peer in topology.peers(rank):
            meets = 0 in (rank, peer)  # through which ranks on GPUs find each other
            assert peer % tensor == rank % tensor or (peer in group and apart) or meets
    assert topology.part(topology.sampler).is_last and topology.part(topology.sampler).tensor_rank == 0
    links = [link for node in range(nodes) for link in topology.local_links(node)]
    links += [link for node in range(nodes) for other in range(node) for link in topology.links_between(node, other)]
    assert len(links) == len(pairs) // 2, "each stream is made once"


# --- the secret ---


def handshake(listens: bytes, connects: bytes) -> tuple[Future[None], Future[None]]:
    here, there = socket.socketpair()
    with here, there, ThreadPoolExecutor(2) as pool:
        accepted = pool.submit(accept, here, listens)
        authenticated = pool.submit(authenticate, there, connects)
        accepted.exception()
        authenticated.exception()
    return accepted, authenticated


def test_both_sides_prove_they_know_the_secret() -> None:
    accepted, authenticated = handshake(SECRET, SECRET)
    accepted.result()
    authenticated.result()


def test_another_secret_is_refused_on_both_sides() -> None:
    for future in handshake(SECRET, OTHER):
        assert isinstance(future.exception(), NotAuthenticated)


def test_the_secret_and_a_repeated_proof_never_help_a_listener() -> None:
    """A program that listens sees a number and a proof for it; neither passes a second time, nor for the other role."""
    here, there = socket.socketpair()
    with here, there, ThreadPoolExecutor(1) as pool:
        future = pool.submit(authenticate, there, SECRET)
        here.sendall(b"quire-group 1\n" + bytes(32))
        said = here.recv(64, socket.MSG_WAITALL)
        assert SECRET not in said
        here.sendall(b"\1" + said[32:])  # the client's own proof, sent back
        assert isinstance(future.exception(), NotAuthenticated)
    first, second = socket.socketpair()
    with first, second, ThreadPoolExecutor(1) as pool:
        future = pool.submit(accept, first, SECRET)
        second.recv(46, socket.MSG_WAITALL)
        second.sendall(said)
        assert isinstance(future.exception(), NotAuthenticated)


@pytest.mark.parametrize("text", ["", "short", "  \n"])
def test_a_short_secret_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "secret").write_text(text)
    for parallel, environ in (
        (ParallelOptions(secret_file=tmp_path / "secret"), {}),
        (ParallelOptions(), {"QUIRE_GROUP_SECRET": text}),
        (ParallelOptions(secret_file=tmp_path / "missing"), {}),
    ):
        with pytest.raises(FlagsError):
            read_secret(parallel, environ)


def test_secret_file_takes_precedence(tmp_path: Path) -> None:
    (tmp_path / "secret").write_text(f"{SECRET.decode()}\n")
    parallel = ParallelOptions(secret_file=tmp_path / "secret")
    assert read_secret(parallel, {"QUIRE_GROUP_SECRET": OTHER.decode()}) == SECRET


# --- the agreement ---


@pytest.mark.parametrize(
    ("change", "part"),
    [
        ({"version": "2"}, "quire-engine is 1 on node 0 and 2 on node 1"),
        ({"model": "n"}, "the model of node 1 is another one"),
        ({"settings": {"cache.block_size": 32}}, "cache.block_size is 16 on node 0 and 32 on node 1"),
        ({"settings": {}}, "cache.block_size is 16 on node 0 and null on node 1"),
    ],
)
def test_differences_between_nodes_are_named(change: dict[str, Any], part: str) -> None:
    fields = {"node": 1, "version": HELLO.version, "model": HELLO.model, "settings": HELLO.settings}
    assert disagreements(HELLO, JoinAsNode(**fields)) == []
    (problem,) = disagreements(HELLO, JoinAsNode(**{**fields, **change}))
    assert part in problem


def test_nodes_may_differ_in_paths_and_threads_only(
    make_folder: Callable[..., Path], engine_config: Callable[..., EngineConfig]
) -> None:
    config = engine_config(make_folder(), parallel=ParallelOptions(tensor=2, nodes=2))
    copied = replace(
        config,
        model=replace(config.model, download_dir=Path("elsewhere")),
        threads=7,
        parallel=replace(config.parallel, node_rank=1, master_addr="leader", secret_file=Path("s")),
    )
    assert disagreements(membership(config), membership(copied)) == []
    other = replace(copied, cache=CacheOptions(block_size=32))
    (problem,) = disagreements(membership(config), membership(other))
    assert "cache.block_size" in problem


def test_the_digest_is_that_of_configuration_and_index(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    header = b'{"w":{"dtype":"F32"}}'
    file = tmp_path / "model.safetensors"
    file.write_bytes(len(header).to_bytes(8, "little") + header + b"values")
    before = model_digest(tmp_path, weights=True)
    file.write_bytes(len(header).to_bytes(8, "little") + header + b"others")
    assert model_digest(tmp_path, weights=True) == before, "values are not read"
    file.write_bytes(len(header).to_bytes(8, "little") + header.replace(b"F32", b"F16"))
    assert model_digest(tmp_path, weights=True) != before
    (tmp_path / "config.json").write_text("{ }")
    assert model_digest(tmp_path, weights=False) != before


# --- the meeting ---


def options(node: int, **changes: Any) -> ParallelOptions:
    fields = {"tensor": 2, "pipeline": 2, "nodes": 2, "node_rank": node, "join_timeout_seconds": 30.0}
    return ParallelOptions(**{**fields, **changes})


def hello(node: int, **changes: Any) -> JoinAsNode:
    return JoinAsNode(**{"node": node, "version": "1", "model": "m", "settings": {"cache.block_size": 16}, **changes})


def meet(
    pool: ThreadPoolExecutor,
    nodes: int = 2,
    secret: bytes = SECRET,
    other: dict[str, Any] | None = None,
    **changes: Any,
) -> list[Future[Connections]]:
    """Start all nodes; ``other`` changes what the last one says."""
    port = consecutive_free_ports(nodes)
    found = [pool.submit(gather, options(0, nodes=nodes, master_port=port, **changes), hello(0), SECRET)]
    for node in range(1, nodes):
        said = hello(node, **(other or {} if node == nodes - 1 else {}))
        found.append(pool.submit(join, options(node, nodes=nodes, master_port=port, **changes), said, secret))
    return found


@pytest.mark.parametrize(("nodes", "tensor", "pipeline"), [(2, 2, 2), (2, 4, 1), (4, 2, 4)])
def test_every_stream_connects_its_two_ranks(nodes: int, tensor: int, pipeline: int) -> None:
    with ThreadPoolExecutor(nodes) as pool:
        met = [future.result() for future in meet(pool, nodes, tensor=tensor, pipeline=pipeline)]
    topology = Topology(tensor=tensor, stages=pipeline, nodes=nodes)
    assert set(met[0].ranks) == set(range(topology.ranks)) - set(topology.ranks_of(0))
    for node, own in enumerate(met):
        assert set(own.streams) == {
            link for other in range(nodes) if other != node for link in topology.links_between(node, other)
        }
        for (rank, peer), stream in own.streams.items():
            stream.sendall(bytes([rank, peer]))
        if node:
            for rank, connection in own.ranks.items():
                connection.sendall(bytes([rank]))
    for own in met:
        for (rank, peer), stream in own.streams.items():
            assert stream.recv(2, socket.MSG_WAITALL) == bytes([peer, rank])
    for rank, connection in met[0].ranks.items():
        assert connection.recv(1) == bytes([rank])
    for own in met:
        own.close()


def test_differing_node_ends_the_start_on_all_nodes() -> None:
    with ThreadPoolExecutor(4) as pool:
        futures = meet(pool, 4, other={"version": "2"}, tensor=4, join_timeout_seconds=20.0)
        errors = [future.exception() for future in (futures[0], futures[3])]
        for error in errors:
            assert isinstance(error, EngineStartError)
            assert error.exit_code == 2, error
            assert "quire-engine is 1 on node 0 and 2 on node 3" in str(error)


def test_missing_node_ends_the_start_on_other_nodes() -> None:
    port = consecutive_free_ports(4)
    with ThreadPoolExecutor(2) as pool:
        changes = {"nodes": 4, "tensor": 4, "master_port": port, "join_timeout_seconds": 3.0}
        first = pool.submit(gather, options(0, **changes), hello(0), SECRET)
        other = pool.submit(join, options(1, **changes), hello(1), SECRET)
        for future in (first, other):
            error = future.exception()
            assert isinstance(error, EngineStartError)
            assert "nodes 2, 3 of 4 did not join within 3 s" in str(error)


def test_nodes_time_out_without_node_0() -> None:
    with pytest.raises(EngineStartError, match="node 0 did not answer at 127.0.0.1:"):
        join(options(1, master_port=consecutive_free_ports(2), join_timeout_seconds=0.3), hello(1), SECRET)


def test_wrong_group_secret_is_rejected_before_any_message() -> None:
    with ThreadPoolExecutor(2) as pool:
        first, other = meet(pool, secret=OTHER, join_timeout_seconds=3.0)
        error = other.exception()
        assert isinstance(error, EngineStartError) and error.exit_code == 2
        assert "it has another group secret and refuses this one" in str(error)
        error = first.exception()
        assert isinstance(error, EngineStartError)
        assert "did not join within 3 s" in str(error) and "it has another group secret" in str(error)


def test_unauthenticated_connections_do_not_end_the_wait() -> None:
    port = consecutive_free_ports(4)
    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(gather, options(0, master_port=port), hello(0), SECRET)
        strangers = []
        for said in (b"", b"GET / HTTP/1.1\r\n\r\n" * 8, bytes(64)):
            stranger = connect(port)
            stranger.sendall(said)
            strangers.append(stranger)
        too_long = connect(port)
        authenticate(too_long, SECRET)
        too_long.sendall(b"\xff\xff\xff\xff")
        taken = connect(port)
        authenticate(taken, SECRET)
        Frames(taken).send(hello(7))
        assert b"the group has 2 nodes" in (Frames(taken).receive() or b"")
        met = [first, pool.submit(join, options(1, master_port=port), hello(1), SECRET)]
        for future in met:
            future.result().close()
        for stranger in (*strangers, too_long, taken):
            stranger.close()


def test_an_aborted_connection_does_not_end_the_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    accept_one, aborted = socket.socket.accept, [ConnectionAbortedError("the client was gone at once")]

    def accept_or_fail(listening: socket.socket) -> Any:
        if aborted:
            raise aborted.pop()
        return accept_one(listening)

    monkeypatch.setattr(socket.socket, "accept", accept_or_fail)
    with ThreadPoolExecutor(2) as pool:
        for future in meet(pool, join_timeout_seconds=5.0):
            future.result().close()


def connect(port: int) -> socket.socket:
    """Connect to a port on which another thread begins to listen."""
    while True:
        try:
            return socket.create_connection(("127.0.0.1", port), timeout=10.0)
        except ConnectionRefusedError:
            continue


# --- the watch ---


Watched = Callable[[float], tuple[Frames, "Future[tuple[str, bool]]", NodeWatch]]


@pytest.fixture
def watched() -> Iterator[Watched]:
    """Return a function that watches a node, which is the other end of a pair of sockets."""
    with ExitStack() as stack:

        def watch(silence_seconds: float) -> tuple[Frames, "Future[tuple[str, bool]]", NodeWatch]:
            here, there = (Frames(stack.enter_context(end)) for end in socket.socketpair())
            lost: Future[tuple[str, bool]] = Future()

            def on_lost(reason: str, *, silent: bool) -> None:
                lost.set_result((reason, silent))

            watch = NodeWatch({1: here}, on_lost, silence_seconds)
            stack.callback(join_watches)
            stack.callback(watch.close)
            return there, lost, watch

        yield watch


def join_watches() -> None:
    """Wait for the threads of watches that were closed or have reported a loss."""
    for thread in threading.enumerate():
        if thread.name == "watch over nodes":
            thread.join(30.0)


def test_lost_node_is_detected(watched: Watched) -> None:
    other, lost, _ = watched(60.0)
    other.send(Beat())
    other.close()
    assert lost.result(30.0) == ("node 1 is gone", False)


def test_silent_node_is_detected(watched: Watched) -> None:
    _, lost, _ = watched(0.01)
    assert lost.result(30.0) == ("node 1 was silent for 0.01 s", True)


def test_a_closed_watch_reports_nothing(watched: Watched) -> None:
    other, lost, watch = watched(60.0)
    watch.close()
    other.close()
    join_watches()
    assert not lost.done()
