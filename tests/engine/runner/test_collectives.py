"""The exchange of data and messages between ranks: over gloo, sockets and memory, and what a torch may lack for it."""

import ipaddress
import re
import socket
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.distributed import HashStore

from quire_engine.config import DeviceOptions, ParallelOptions
from quire_engine.errors import EngineStartError
from quire_engine.runner.device_choice import FoundDevices, Gpu
from quire_engine.runner.parallel.checks import FoundCollectives, collectives_problem
from quire_engine.runner.parallel.collectives import (
    CPU,
    DistributedGroup,
    RankLinks,
    RankLost,
    choose_interface,
    interface_of,
    join_process_group,
)
from quire_engine.runner.parallel.messages import Channel, GlooChannel, SocketChannel
from quire_engine.runner.parallel.rank import find_place
from quire_engine.runner.parallel.store import host_store
from quire_engine.runner.parallel.topology import Topology
from quire_kernels.all_reduce.reference import all_reduce


def join_all(ranks: int, own: str = "127.0.0.1") -> list[Any]:
    """Return the process group of each rank, all of which are threads of this process."""
    store, every = HashStore(), range(ranks)
    timeout = timedelta(seconds=120)
    with ThreadPoolExecutor(ranks) as pool:
        joins = [
            pool.submit(join_process_group, "test", every, rank, CPU, store=store, own=own, timeout=timeout)
            for rank in every
        ]
        return [joined.result() for joined in joins]


def groups(ranks: int, *, in_order: bool = True) -> list[DistributedGroup]:
    found = [DistributedGroup(ranks, in_order=in_order) for _ in range(ranks)]
    for one, joined in zip(found, join_all(ranks), strict=True):
        one.group = joined
    return found


def at_once(call: Callable[..., Any], *arguments: list[Any]) -> list[Any]:
    with ThreadPoolExecutor(len(arguments[0])) as pool:
        return list(pool.map(call, *arguments))


# --- sums ---


@pytest.mark.parametrize("ranks", [2, 3])
def test_all_ranks_get_the_sum_of_shared_memory(ranks: int) -> None:
    torch.manual_seed(ranks)
    own = groups(ranks)
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        for rows in (0, 1, 3000):
            tensors = [torch.randn(rows, 128).to(dtype) for _ in range(ranks)]
            found = at_once(lambda group, x: group.all_reduce(x), own, tensors)
            assert all(torch.equal(one, all_reduce(tensors)) for one in found)


def test_sums_in_any_order_are_sums() -> None:
    found = at_once(lambda group, x: group.all_reduce(x), groups(2, in_order=False), [torch.ones(3), torch.ones(3) * 2])
    assert all(torch.equal(one, torch.full((3,), 3.0)) for one in found)


def test_every_rank_gets_the_columns_of_all() -> None:
    tensors = [torch.randn(5, width) for width in (3, 4, 1)]
    found = at_once(lambda group, x: group.gather(x, (3, 4, 1)), groups(3), tensors)
    assert all(torch.equal(one, torch.cat(tensors, dim=1)) for one in found)


# --- the connections of ranks ---


def test_each_rank_reaches_its_stage_and_the_next() -> None:
    """As if each rank had a node of its own."""
    topology, store = Topology(tensor=2, stages=3, nodes=6), host_store()
    ranks = [RankLinks(topology, rank, memory=None, place=store.place, in_order=False) for rank in range(6)]
    at_once(lambda links: links.connect(120.0), ranks)
    sums = at_once(
        lambda links, value: links.links.tensor.all_reduce(torch.full((1, 2), value)),
        ranks,
        [float(rank) for rank in range(6)],
    )
    assert [found[0, 0].item() for found in sums] == [1.0, 1.0, 5.0, 5.0, 9.0, 9.0]
    for step in range(3):  # before any is received
        for rank in range(4):
            ranks[rank].links.after.send(torch.full((step + 1, 3), float(rank)))  # type: ignore[union-attr]
    for step in range(3):
        for rank in range(2, 6):
            x = ranks[rank].links.before.receive(step + 1, 3, torch.float32)  # type: ignore[union-attr]
            assert torch.equal(x, torch.full((step + 1, 3), float(rank - 2)))
    assert ranks[0].links.before is None and ranks[0].waited is None and ranks[5].links.after is None
    began, ended = ranks[5].waited or pytest.fail("it waited")
    assert ended.seconds_since(began) >= 0
    ranks[0].close()
    with pytest.raises(RankLost, match="lost another rank of its group"):
        ranks[2].links.before.receive(1, 3, torch.float32)  # type: ignore[union-attr]
    with pytest.raises(RankLost, match="lost another rank of its group"):
        ranks[1].links.tensor.all_reduce(torch.zeros(1, 1))


# --- messages ---


@pytest.fixture(params=["gloo", "gloo over IPv6", "sockets"])
def channels(request: pytest.FixtureRequest) -> Iterator[list[Channel]]:
    """Return both ends of a channel."""
    if request.param == "sockets":
        found: list[Channel] = [SocketChannel(end) for end in socket.socketpair()]
    else:
        own = "::1" if "IPv6" in request.param else "127.0.0.1"
        found = [GlooChannel(group, 1 - rank) for rank, group in enumerate(join_all(2, own))]
    yield found
    for channel in found:
        channel.close()


def test_messages_arrive_whole_and_in_order(channels: list[Channel]) -> None:
    here, there = channels
    messages = [bytes([size % 251]) * size for size in (0, 1, 4091, 4092, 4093, 30_000, 5)]
    for message in messages:
        here.send(message)  # before any is received
    assert [there.receive() for _ in messages] == messages
    there.send(b"answer")
    assert here.receive() == b"answer"


def test_the_end_of_the_other_side_is_noticed(channels: list[Channel]) -> None:
    here, there = channels
    with ThreadPoolExecutor(2) as pool:
        waiting = pool.submit(there.receive)
        watch = pool.submit(there.await_end) if isinstance(there, GlooChannel) else None
        here.close()
        assert waiting.result(60.0) is None
        assert watch is None or re.match("Connection closed|Read error", watch.result(60.0))
    with pytest.raises(OSError):
        for _ in range(3):
            there.send(b"too late")


# --- the place of a rank ---


def test_nccl_listens_where_the_nodes_have_met(monkeypatch: pytest.MonkeyPatch) -> None:
    variables: dict[str, str] = {}
    monkeypatch.setattr("os.environ", variables)
    choose_interface("127.0.0.1")
    assert variables == {"NCCL_SOCKET_IFNAME": "=lo", "NCCL_SOCKET_FAMILY": "AF_INET"}
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


# --- the libraries ---

FOUND = FoundCollectives(torch_version="2.11.0+cu130", nccl=True, gloo=True)


@pytest.mark.parametrize(
    ("nodes", "device_type", "found", "part"),
    [
        (2, "cuda", FOUND, None),
        (2, "cpu", replace(FOUND, nccl=False), None),
        (1, "cuda", replace(FOUND, gloo=False), None),
        (1, "cuda", replace(FOUND, nccl=False), "torch 2.11.0+cu130 is built without NCCL"),
        (1, "cpu", replace(FOUND, gloo=False), "torch 2.11.0+cu130 is built without gloo"),
        (2, "cuda", replace(FOUND, gloo=False), "torch 2.11.0+cu130 is built without gloo"),
    ],
)
def test_a_missing_library_is_named(nodes: int, device_type: str, found: FoundCollectives, part: str | None) -> None:
    problem = collectives_problem(ParallelOptions(tensor=2, nodes=nodes), device_type, found)
    assert problem is None if part is None else problem is not None and part in problem
