"""Nodes form a group: they prove that they share a secret, agree on what they run, and notice each other's end."""

import socket
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from quire_cluster.ports import free_ports
from quire_common.errors import FlagsError
from quire_engine.config import CacheOptions, EngineConfig, ParallelOptions
from quire_engine.errors import EngineStartError
from quire_engine.group_secret import NotAuthenticated, read_secret, sign, verify
from quire_engine.runner.parallel.agreement import Membership, disagreements, membership, model_digest
from quire_engine.runner.parallel.node import NodeWatch
from quire_engine.runner.parallel.rendezvous import Attempt, Join, Places, gather, join
from quire_engine.runner.parallel.store import GroupStore, StoreLost, address_towards, host_store, join_store
from quire_engine.runner.parallel.topology import Topology

SECRET = b"a secret of some length"
OTHER = b"another secret, as long"


@pytest.mark.parametrize("sizes", [(1, 2, 1), (2, 2, 1), (2, 2, 2), (4, 1, 2), (2, 4, 4), (4, 2, 4), (1, 3, 3)])
def test_each_rank_has_a_node_and_a_part(sizes: tuple[int, int, int]) -> None:
    tensor, stages, nodes = sizes
    topology = Topology(tensor=tensor, stages=stages, nodes=nodes)
    assert [rank for node in range(nodes) for rank in topology.ranks_of(node)] == list(range(topology.ranks))
    for rank in range(topology.ranks):
        assert topology.part(rank).stage == rank // tensor
        group = topology.tensor_group(rank)
        apart = topology.node_of(group[0]) != topology.node_of(group[-1])
        assert topology.shares_memory(rank) is (tensor > 1 and not apart)
        assert (rank in topology.steps_group) is (rank == 0 or topology.node_of(rank) > 0)
    assert topology.part(topology.sampler).is_last and topology.part(topology.sampler).tensor_rank == 0


# --- the secret ---


def test_a_proof_is_of_one_secret_role_and_exchange() -> None:
    proof = {"role": b"joins", "challenge": b"1" * 32}
    signed = sign(SECRET, b"said", **proof)
    assert verify(SECRET, signed, **proof) == b"said" and SECRET not in signed
    for secret, said, changes in (
        (OTHER, signed, {}),
        (SECRET, signed + b"more", {}),
        (SECRET, b"", {}),
        (SECRET, signed, {"role": b"answers"}),
        (SECRET, signed, {"challenge": b"2" * 32}),
    ):
        with pytest.raises(NotAuthenticated):
            verify(secret, said, **{**proof, **changes})


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


def hello(node: int, **changes: Any) -> Membership:
    return Membership(**{"node": node, "version": "1", "model": "m", "settings": {"cache.block_size": 16}, **changes})


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
    assert disagreements(hello(0), hello(1)) == []
    (problem,) = disagreements(hello(0), hello(1, **change))
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


# --- the places ---


def attempt(number: int, node: int, arrived: float) -> Attempt:
    said = Join(nonce=b"", address=f"10.0.0.{number}", membership=hello(node))
    return Attempt(number=number, join=said, arrived=arrived, seen=arrived)


@pytest.mark.parametrize(("still_there", "joined"), [(True, 1), (False, 2)])
def test_a_second_node_of_one_number_waits_for_a_sign_of_the_first(still_there: bool, joined: int) -> None:
    """It is refused if there is one. Without, the first one has ended, and the second one is its restart."""
    places = Places(3, waiting=[attempt(1, 1, 0.0)])
    assert [one.number for one in places.settle()[0]] == [1] and places.missing == [2]
    places.waiting.append(attempt(2, 1, 4.0))
    assert places.settle() == ([], [])
    if still_there:
        places.taken[1].seen = 4.5
        _, ((refused, reason),) = places.settle()
        assert refused.number == 2 and "a node with this number has joined already, from 10.0.0.1" in reason
    places.waiting = [replace(one, seen=6.0) for one in places.waiting]
    assert [one.number for one in places.leave(6.0)] == ([] if still_there else [1])
    places.settle()
    assert places.taken[1].number == joined and not places.waiting


@pytest.mark.parametrize("node", [0, 3, -1])
def test_a_number_outside_the_group_is_refused(node: int) -> None:
    places = Places(3, waiting=[attempt(1, node, 0.0)])
    _, ((_, reason),) = places.settle()
    assert f"--node-rank {node}: the group has 3 nodes" in reason and places.missing == [1, 2]


# --- the rendezvous ---


def options(node: int, **changes: Any) -> ParallelOptions:
    fields = {"tensor": 2, "pipeline": 2, "nodes": 2, "node_rank": node, "join_timeout_seconds": 60.0}
    return ParallelOptions(**{**fields, **changes})


def meet(
    pool: ThreadPoolExecutor,
    nodes: int = 2,
    secret: bytes = SECRET,
    other: dict[str, Any] | None = None,
    **changes: Any,
) -> list["Future[GroupStore]"]:
    """Start all nodes; ``other`` changes what the last one says."""
    changes = {"nodes": nodes, "master_port": free_ports(1)[0], **changes}
    found = [pool.submit(gather, options(0, **changes), hello(0), SECRET, 30.0)]
    for node in range(1, nodes):
        said = hello(node, **(other or {} if node == nodes - 1 else {}))
        found.append(pool.submit(join, options(node, **changes), said, secret, 30.0))
    return found


@pytest.mark.parametrize("address", ["127.0.0.1", "::1", "localhost"])
def test_nodes_that_agree_share_a_store(address: str) -> None:
    with ThreadPoolExecutor(3) as pool:
        first, *others = (future.result() for future in meet(pool, 3, master_addr=address))
    first.set("key", b"\0value")
    for other in others:
        assert other.place.connect().get("key") == b"\0value"
        assert other.place.session == first.place.session
        assert other.place.own == first.place.own == ("::1" if address == "::1" else "127.0.0.1")


def test_differing_node_ends_the_start_on_all_nodes() -> None:
    with ThreadPoolExecutor(4) as pool:
        futures = meet(pool, 4, other={"version": "2"}, tensor=4)
        errors = [future.exception() for future in (futures[0], futures[3])]
        for error in errors:
            assert isinstance(error, EngineStartError)
            assert error.exit_code == 2, error
            assert "quire-engine is 1 on node 0 and 2 on node 3" in str(error)


def test_missing_node_ends_the_start_on_other_nodes() -> None:
    changes = {"nodes": 4, "tensor": 4, "master_port": free_ports(1)[0], "join_timeout_seconds": 4.0}
    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(gather, options(0, **changes), hello(0), SECRET, 30.0)
        other = pool.submit(join, options(1, **changes), hello(1), SECRET, 30.0)
        for future in (first, other):
            error = future.exception()
            assert isinstance(error, EngineStartError)
            assert "nodes 2, 3 of 4 did not join within 4 s" in str(error)


def test_nodes_time_out_without_node_0() -> None:
    with pytest.raises(EngineStartError, match="node 0 did not answer at 127.0.0.1:"):
        join(options(1, master_port=free_ports(1)[0], join_timeout_seconds=0.3), hello(1), SECRET, 30.0)


def test_wrong_group_secret_is_refused_and_does_not_end_the_wait() -> None:
    with ThreadPoolExecutor(3) as pool:
        port = free_ports(1)[0]
        first, other = meet(pool, secret=OTHER, master_port=port)
        error = other.exception()
        assert isinstance(error, EngineStartError) and error.exit_code == 2
        assert "it has another group secret and refuses this one" in str(error)
        assert not first.done()
        joined = pool.submit(join, options(1, master_port=port), hello(1), SECRET, 30.0)
        assert joined.result().place.session == first.result().place.session


def test_wrong_group_secret_is_named_when_the_wait_ends() -> None:
    with ThreadPoolExecutor(2) as pool:
        first, _ = meet(pool, secret=OTHER, join_timeout_seconds=4.0)
        with pytest.raises(EngineStartError, match="did not join within 4 s.*another group secret"):
            first.result()


def test_second_node_of_a_number_is_named_after_the_group_formed() -> None:
    with ThreadPoolExecutor(4) as pool:
        port = free_ports(1)[0]
        met = [future.result() for future in meet(pool, master_port=port)]
        late = pool.submit(join, options(1, master_port=port, join_timeout_seconds=0.1), hello(1), SECRET, 30.0)
        with pytest.raises(EngineStartError, match="its group is complete, and another node has joined with"):
            late.result()
        assert len(met) == 2


def test_strangers_do_not_end_the_wait() -> None:
    with ThreadPoolExecutor(2) as pool:
        port = free_ports(1)[0]
        first = pool.submit(gather, options(0, master_port=port), hello(0), SECRET, 30.0)
        strangers = []
        for said in (b"", b"GET / HTTP/1.1\r\n\r\n" * 8, bytes(64)):
            strangers.append(connect(port))
            strangers[-1].sendall(said)
        store = join_store("127.0.0.1", port)
        for said in (b"no proof", bytes(1 << 17)):
            store.set(f"join/{store.add('joins', 1)}", said)
        joined = pool.submit(join, options(1, master_port=port), hello(1), SECRET, 30.0)
        assert joined.result().place.session == first.result().place.session
        for stranger in strangers:
            stranger.close()


def connect(port: int) -> socket.socket:
    """Connect to a port on which another thread begins to listen."""
    while True:
        try:
            return socket.create_connection(("127.0.0.1", port), timeout=10.0)
        except ConnectionRefusedError:
            continue


def test_another_program_on_the_port_of_node_0_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """It may never answer, for which torch would wait forever."""
    monkeypatch.setattr("quire_engine.runner.parallel.store._CONNECT_SECONDS", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as silent, pytest.raises(StoreLost, match="no answer for 0.2 s"):
        join_store("127.0.0.1", silent.getsockname()[1])
    for thread in threading.enumerate():
        if thread.name == "group store":
            thread.join(30.0)


def test_the_own_address_is_the_one_towards_the_others() -> None:
    assert (address_towards("127.0.0.1"), address_towards("::1")) == ("127.0.0.1", "::1")


# --- the watch ---


@pytest.fixture
def lost() -> Iterator[Callable[..., "Future[str]"]]:
    """Return a function that watches node 1 on node 0, and returns why it is lost."""
    watches = []

    def watch(store: GroupStore, silence_seconds: float) -> "Future[str]":
        found: Future[str] = Future()

        def on_lost(reason: str, *, silent: bool) -> None:
            found.set_result(reason)

        watches.append(NodeWatch(store, 0, [1], on_lost, silence_seconds))
        return found

    yield watch
    for one in watches:
        one.close()
    for thread in threading.enumerate():
        if thread.name == "watch over nodes":
            thread.join(30.0)


def test_silent_node_is_detected(lost: Callable[..., "Future[str]"]) -> None:
    store = host_store()
    other = NodeWatch(store, 1, [0], lambda reason, *, silent: None, 60.0)
    found = lost(store, 3.0)
    other.close()
    assert found.result(60.0) == "node 1 was silent for 3 s"


def test_lost_node_0_is_detected(lost: Callable[..., "Future[str]"]) -> None:
    class Gone:
        def add(self, key: str, amount: int) -> int:
            raise RuntimeError("Connection reset by peer\nframe #0: ...")

    found = lost(GroupStore(Gone(), host_store().place, 1.0), 60.0)  # type: ignore[arg-type]
    assert found.result(60.0) == "node 0 is gone: Connection reset by peer"
