"""The connections of ranks on GPUs: groups over NCCL, the store for their meeting, and parts that torch may lack."""

import ipaddress
import os
import socket
from collections import deque
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from quire_engine.config import DeviceOptions, ParallelOptions
from quire_engine.errors import EngineStartError
from quire_engine.runner.device.accelerator import InterpretedMark
from quire_engine.runner.device_choice import FoundDevices, Gpu
from quire_engine.runner.parallel.checks import device_problems
from quire_engine.runner.parallel.collectives import FoundCollectives, collectives_problem
from quire_engine.runner.parallel.device_group import DeviceGroup, DeviceRanks, DeviceStream
from quire_engine.runner.parallel.interfaces import choose_interface, interface_of
from quire_engine.runner.parallel.rank import find_place
from quire_engine.runner.parallel.rank_store import RankStore, StoreFailed
from quire_engine.runner.parallel.topology import Topology

FOUND = FoundCollectives(torch_version="2.11.0+cu130", nccl=True, gloo=True)
NCCL_VARIABLES = ("NCCL_SOCKET_IFNAME", "NCCL_SOCKET_FAMILY", "GLOO_SOCKET_IFNAME")


@dataclass
class FakeDistributed:
    """The functions of torch.distributed. ``others`` are what the ranks after the first one pass on."""

    others: tuple[torch.Tensor, ...] = ()
    joined: dict[str, Any] = field(default_factory=dict)
    groups: list[list[int]] = field(default_factory=list)
    sent: deque[Any] = field(default_factory=deque)
    waited: list[torch.Tensor] = field(default_factory=list)
    left: list[str] = field(default_factory=list)
    group: SimpleNamespace = field(init=False)

    def __post_init__(self) -> None:
        self.group = SimpleNamespace(WORLD=self._new("all"))

    def _new(self, name: str) -> Any:
        return SimpleNamespace(name=name, abort=lambda: self.left.append(name))

    def init_process_group(self, backend: str, **options: Any) -> None:
        self.joined = {"backend": backend, **options}

    def new_group(self, ranks: list[int], timeout: timedelta) -> Any:
        self.groups.append(ranks)
        return self._new(str(ranks))

    def all_reduce(self, x: torch.Tensor, group: Any) -> None:
        for other in self.others:
            x += other

    def all_gather(self, found: list[torch.Tensor], x: torch.Tensor, group: Any) -> None:
        for target, source in zip(found, (x, *self.others), strict=True):
            target.copy_(source)

    def isend(self, x: torch.Tensor, peer: int, group: Any) -> Any:
        self.sent.append(x)
        return SimpleNamespace(wait=lambda: self.waited.append(x))

    def irecv(self, x: torch.Tensor, peer: int, group: Any) -> Any:
        return SimpleNamespace(wait=lambda: x.copy_(self.sent.popleft()))

    def destroy_process_group(self) -> None:
        self.left.append("gloo")


def group_of(fake: FakeDistributed, **options: Any) -> DeviceGroup:
    return DeviceGroup(1 + len(fake.others), distributed=fake, **options)


@pytest.fixture(autouse=True)
def _variables(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in NCCL_VARIABLES:
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)


@pytest.mark.parametrize(("device", "backend"), [("cuda:1", "nccl"), ("cpu", "gloo")])
def test_gpus_of_one_machine_meet_over_loopback(device: str, backend: str) -> None:
    fake = FakeDistributed()
    ranks = DeviceRanks(
        Topology(tensor=2, stages=1, nodes=1),
        0,
        RankStore({}),
        device=torch.device(device),
        mark=InterpretedMark,
        distributed=fake,
    )
    ranks.connect(5.0)
    assert fake.joined["backend"] == backend
    assert fake.joined["device_id"] == (torch.device(device) if backend == "nccl" else None)
    assert (fake.joined["rank"], fake.joined["world_size"]) == (0, 2)
    assert fake.joined["store"].wait_seconds == 5.0
    assert os.environ["NCCL_SOCKET_IFNAME"] == os.environ["GLOO_SOCKET_IFNAME"] == "lo"
    assert isinstance(ranks.tensor, DeviceGroup) and ranks.tensor.group is fake.group.WORLD
    assert (ranks.before, ranks.after, fake.groups) == (None, None, [])
    ranks.close()
    ranks.close()
    assert fake.left == (["all"] if backend == "nccl" else ["gloo"])


@pytest.mark.parametrize(
    ("rank", "tensor", "before", "after"),
    [(0, "[0, 1]", None, "[0, 2]"), (3, "[2, 3]", "[1, 3]", "[3, 5]"), (4, "[4, 5]", "[2, 4]", None)],
)
def test_each_rank_has_the_groups_of_its_place(rank: int, tensor: str, before: str | None, after: str | None) -> None:
    fake = FakeDistributed()
    ranks = DeviceRanks(
        Topology(tensor=2, stages=3, nodes=1),
        rank,
        RankStore({}),
        device=torch.device("cuda", 0),
        mark=InterpretedMark,
        distributed=fake,
    )
    ranks.connect(5.0)
    assert fake.groups == [[0, 1], [2, 3], [4, 5], [0, 2], [1, 3], [2, 4], [3, 5]], "all make all, in one order"
    assert isinstance(ranks.tensor, DeviceGroup) and ranks.tensor.group.name == tensor
    assert (ranks.before and ranks.before.group.name, ranks.after and ranks.after.group.name) == (before, after)
    ranks.close()
    assert fake.left == [*(name for name in (tensor, before, after) if name), "all"]


def test_ranks_that_never_met_leave_nothing() -> None:
    fake = FakeDistributed()
    topology = Topology(tensor=1, stages=2, nodes=1)
    DeviceRanks(topology, 1, RankStore({}), device=torch.device("cpu"), mark=InterpretedMark, distributed=fake).close()
    assert not fake.left


def test_steps_in_flight_are_sent_without_waiting() -> None:
    """The first send is waited for when there are more than steps in flight: then it is done."""
    fake = FakeDistributed()
    stream = DeviceStream(1, device=torch.device("cpu"), steps=2, mark=InterpretedMark, distributed=fake)
    first, second, third = (torch.full((2, 3), float(step)) for step in range(3))
    stream.send(first)
    stream.send(second)
    assert not fake.waited and stream.wait is None
    stream.send(third)
    assert [x is first for x in fake.waited] == [True]
    found = [stream.receive(2, 3, torch.float32) for _ in range(3)]
    assert all(torch.equal(x, sent) for x, sent in zip(found, (first, second, third), strict=True))
    assert stream.wait is not None and stream.wait[1].seconds_since(stream.wait[0]) >= 0


# --- the store ---


@pytest.fixture
def stores() -> Iterator[list[RankStore]]:
    """Return the stores of three ranks."""
    pairs = {rank: socket.socketpair() for rank in (1, 2)}
    found = [RankStore({rank: pair[0] for rank, pair in pairs.items()})]
    found += [RankStore({0: pair[1]}) for pair in pairs.values()]
    with ExitStack() as closing:
        for store in found:
            closing.callback(store.close)
        yield found


def test_every_rank_sees_what_torch_stores(stores: list[RankStore]) -> None:
    first, second, third = (torch.distributed.PrefixStore("group", store) for store in stores)
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(third.get, "id")
        second.set("id", b"\x00unique")
        assert waiting.result(30.0) == b"\x00unique" == first.get("id")
    assert [store.add("count", 2) for store in (first, second, third)] == [2, 4, 6]
    assert first.check(["id", "count"]) and not second.check(["id", "other"])
    assert second.compare_set("id", "other", "new") == b"\x00unique"
    assert second.compare_set("lock", "", "mine") == b"mine" == third.get("lock")
    assert third.num_keys() == 3 and third.delete_key("lock") and first.num_keys() == 2
    second.wait(["id"], timedelta(seconds=30))


def test_missing_rank_and_lost_rank_0_are_errors(stores: list[RankStore]) -> None:
    for store in stores:
        store.wait_seconds = 0.001
        with pytest.raises(StoreFailed, match="waited for absent"):
            store.get("absent")
    stores[0].close()
    with pytest.raises(StoreFailed, match="rank 0 is gone"):
        stores[1].set("key", b"value")


# --- the place of a rank ---


def test_libraries_listen_where_the_nodes_have_met() -> None:
    variables: dict[str, str] = {}
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()) as met:
        choose_interface(met, variables)
    assert variables == dict(zip(NCCL_VARIABLES, ("=lo", "AF_INET", "lo"), strict=True))
    assert interface_of(ipaddress.ip_address("::1")) == "lo"
    assert interface_of(ipaddress.ip_address("192.0.2.1")) is interface_of(ipaddress.ip_address("2001:db8::1")) is None


H100 = Gpu(index=0, name="NVIDIA H100", capability=(9, 0), memory_bytes=80 << 30)
TWO_GPUS = FoundDevices(torch_version="2", architectures=("sm_90",), gpus=(H100, replace(H100, index=1)), failure=None)


def config_of(parallel: ParallelOptions) -> Any:
    return SimpleNamespace(device=DeviceOptions(device="auto"), parallel=parallel)


@pytest.mark.parametrize(("rank", "index"), [(0, 0), (1, 1), (2, 0), (3, 1)])
def test_each_rank_has_a_gpu_of_its_node(rank: int, index: int) -> None:
    config = config_of(ParallelOptions(tensor=2, pipeline=2, nodes=2))
    assert find_place(config, "NVIDIA H100", rank, lambda: TWO_GPUS) == torch.device("cuda", index)
    assert find_place(config, None, rank, lambda: TWO_GPUS) == torch.device("cpu")


@pytest.mark.parametrize(
    ("gpu", "found", "part"),
    [
        ("NVIDIA A100", TWO_GPUS, "node 1 would on NVIDIA H100: all ranks need GPUs of one kind"),
        ("NVIDIA H100", replace(TWO_GPUS, gpus=(H100,)), "node 1 cannot: --tensor-parallel-size 4 needs 2 GPUs"),
        ("NVIDIA H100", replace(TWO_GPUS, gpus=()), "node 1 cannot: there is no GPU that this process may see"),
    ],
)
def test_node_without_the_gpus_of_rank_0_is_refused(gpu: str, found: FoundDevices, part: str) -> None:
    with pytest.raises(EngineStartError, match=part) as caught:
        find_place(config_of(ParallelOptions(tensor=4, nodes=2)), gpu, 2, lambda: found)
    assert caught.value.exit_code == 2


# --- the tensor group ---


@pytest.mark.parametrize("in_order", [False, True])
def test_ranks_are_added(in_order: bool) -> None:
    others = tuple(torch.full((2, 3), float(value), dtype=torch.bfloat16) for value in (2, 4))
    group = group_of(FakeDistributed(others=others), in_order=in_order)
    found = group.all_reduce(torch.ones((2, 3), dtype=torch.bfloat16))
    assert found.dtype == torch.bfloat16 and torch.equal(found, torch.full((2, 3), 7.0, dtype=torch.bfloat16))


def test_sums_in_order_round_once() -> None:
    """256 and two halves of a step: each alone would be lost in bfloat16."""
    others = tuple(torch.ones(1, dtype=torch.bfloat16) for _ in range(2))
    group = group_of(FakeDistributed(others=others), in_order=True)
    assert group.all_reduce(torch.full((1,), 256.0, dtype=torch.bfloat16)).item() == 258.0


def test_shares_of_different_widths_are_joined() -> None:
    others = (torch.tensor([[3.0, 4.0, 5.0], [13.0, 14.0, 15.0]]),)
    group = group_of(FakeDistributed(others=others))
    found = group.gather(torch.tensor([[1.0, 2.0], [11.0, 12.0]]), (2, 3))
    assert found.tolist() == [[1.0, 2.0, 3.0, 4.0, 5.0], [11.0, 12.0, 13.0, 14.0, 15.0]]


@pytest.mark.parametrize(
    ("device_type", "found", "part"),
    [
        ("cuda", FOUND, None),
        ("cpu", replace(FOUND, nccl=False), None),
        ("cuda", replace(FOUND, nccl=False), "torch 2.11.0+cu130 is built without NCCL"),
        ("cpu", replace(FOUND, gloo=False), "torch 2.11.0+cu130 is built without gloo"),
    ],
)
def test_a_missing_backend_is_named(device_type: str, found: FoundCollectives, part: str | None) -> None:
    problem = collectives_problem(device_type, found)
    assert problem is None if part is None else problem is not None and part in problem


def test_missing_nccl_stops_the_start_by_name() -> None:
    problems = list(
        device_problems(ParallelOptions(tensor=2), "NVIDIA H100", "cuda", lambda: replace(FOUND, nccl=False))
    )
    (problem,) = problems
    assert problem.startswith("--tensor-parallel-size 2 cannot be used on NVIDIA H100: torch 2.11.0+cu130 is built")
    assert not list(device_problems(ParallelOptions(tensor=2), "NVIDIA H100", "cuda", lambda: FOUND))
