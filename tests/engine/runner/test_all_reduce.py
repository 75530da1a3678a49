"""The choice between NCCL and symmetric memory for the sums of ranks on GPUs, and the agreement of the ranks on it.

There is no GPU: threads stand for ranks, with stand-ins for torch's memory and kernels. The calls of the kernels are
held against torch's own schemas.
"""

import math
import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from quire_engine.runner.device.accelerator import InterpretedMark
from quire_engine.runner.parallel.all_reduce_choice import (
    TOKENS,
    AllReduceFacts,
    AllReduceTimes,
    Way,
    WaysBySize,
    fastest,
    in_words,
    refusal,
    slowest,
)
from quire_engine.runner.parallel.all_reduce_start import AllReduceChoice, FasterSums, Trial, choose_all_reduce
from quire_engine.runner.parallel.device_group import DeviceGroup, DeviceRanks
from quire_engine.runner.parallel.rank_store import RankStore, StoreFailed
from quire_engine.runner.parallel.symmetric_memory import SymmetricMemory, folder_problem, has_symmetric_memory
from quire_engine.runner.parallel.together import FailedTogether, Together
from quire_engine.runner.parallel.topology import Topology

FACTS = AllReduceFacts(
    disabled=False,
    in_order=False,
    on_one_node=True,
    device_type="cuda",
    hip=None,
    ranks=2,
    dtype="bfloat16",
    torch_version="2.13.0",
    has_memory=True,
)
CPU = torch.device("cpu")
COLUMNS = 16

# --- the decision ---


@pytest.mark.parametrize(
    ("changed", "part"),
    [
        ({}, None),
        ({"ranks": 8, "dtype": "float32"}, None),
        ({"disabled": True}, "--disable-custom-all-reduce"),
        ({"in_order": True}, "--deterministic"),
        ({"device_type": "cpu"}, "GPUs of NVIDIA"),
        ({"hip": "7.1"}, "GPUs of NVIDIA"),
        ({"on_one_node": False}, "on one node"),
        ({"ranks": 3}, "the group has 3"),
        ({"dtype": "float16"}, "computes in float16"),
        ({"has_memory": False, "torch_version": "2.11.0"}, "this is 2.11.0"),
    ],
)
def test_where_symmetric_memory_is_not_tried(changed: dict[str, Any], part: str | None) -> None:
    found = refusal(replace(FACTS, **changed))
    assert found is None if part is None else found is not None and part in found


def times(nccl: Sequence[float], **ways: Sequence[float]) -> AllReduceTimes:
    named: dict[Way, tuple[float, ...]] = {}
    names: dict[str, Way] = {"one": "one-shot", "two": "two-shot", "multi": "multicast"}
    for name, column in ways.items():
        named[names[name]] = tuple(column)
    return AllReduceTimes(tokens=(1, 32, 256)[: len(nccl)], nccl=tuple(nccl), ways=named)


@pytest.mark.parametrize(
    ("measured", "chosen"),
    [
        (times((20, 24, 60), one=(6, 9, 90), two=(12, 8, 40)), ("one-shot", "two-shot", "two-shot")),
        (times((20, 24, 60), one=(6, 30, 59)), ("one-shot", None, None)),
        (times((20, 24), one=(19.9, 24)), (None, None)),
        (times((20, 24), multi=(10, 10), one=(10, 11)), ("multicast", "multicast")),
        (times((20, 24), one=(math.nan, math.inf)), (None, None)),
        (times((20, 24)), (None, None)),
    ],
)
def test_each_size_has_the_fastest_way(measured: AllReduceTimes, chosen: tuple[Way | None, ...]) -> None:
    assert fastest(measured) == chosen


def test_the_slowest_rank_counts() -> None:
    first, second = times((20, 24), one=(6, 9), two=(1, 1)), times((18, 30), one=(8, 7), two=(2, 0))
    assert slowest([first, second]) == slowest([second, first]) == times((20, 30), one=(8, 9), two=(2, 1))


@pytest.mark.parametrize(
    ("num_bytes", "way"),
    [(0, None), (16, "one-shot"), (32, "one-shot"), (48, None), (1008, "two-shot"), (1024, "two-shot"), (1040, None)]
    + [(8, None), (40, None), (1022, None)],
)
def test_the_size_alone_decides(num_bytes: int, way: Way | None) -> None:
    ways = WaysBySize(sizes=(32, 64, 1024), ways=("one-shot", None, "two-shot"))
    assert ways.way(num_bytes) == way


def test_the_report_names_ways_and_factors() -> None:
    measured = times((20, 24, 60), one=(5, 30, 90), two=(12, 26, 40))
    line = in_words(measured, fastest(measured))
    assert line.startswith("sums of ranks over symmetric memory")
    assert "1: 20 and 5, one-shot (4.0×); 32: 24 and 26, NCCL (0.9×); 256: 60 and 40, two-shot (1.5×)" in line
    slower = times((20,), one=(30,))
    assert in_words(slower, fastest(slower)).startswith("sums of ranks by NCCL (")


# --- the agreement ---


@pytest.fixture
def stores() -> Iterator[list[RankStore]]:
    """Return the stores of two ranks, as those of a group have them."""
    here, there = socket.socketpair()
    with ExitStack() as closing:
        found = [RankStore({1: here}), RankStore({0: there})]
        for store in found:
            store.wait_seconds = 60.0
            closing.callback(store.close)
        yield found


def on_ranks(work: Callable[[int], Any]) -> list[Any]:
    """Run two ranks at the same time. Return their results, or the exceptions that they raised."""
    with ThreadPoolExecutor(2) as pool:
        started = [pool.submit(work, rank) for rank in range(2)]
        return [one.exception(120.0) or one.result() for one in started]


def test_all_ranks_get_the_results_of_all(stores: list[RankStore]) -> None:
    def work(rank: int) -> list[list[Any]]:
        together = Together(stores[rank], "test", rank, (0, 1))
        return [together.do(lambda: rank + 10, int), together.do(lambda: None, type(None))]

    assert on_ranks(work) == [[[10, 11], [None, None]]] * 2


@pytest.mark.parametrize(
    ("failing", "message"), [((0,), "no memory (rank 0)"), ((1,), "no memory (rank 1)"), ((0, 1), "no memory")]
)
def test_a_failure_is_that_of_all_ranks(stores: list[RankStore], failing: tuple[int, ...], message: str) -> None:
    def work(rank: int) -> list[int]:
        together = Together(stores[rank], "test", rank, (0, 1))

        def part() -> int:
            if rank in failing:
                raise OSError("no\n  memory")
            return rank

        with pytest.raises(FailedTogether) as caught:
            together.do(part, int)
        assert str(caught.value) == message
        return together.do(lambda: rank, int)  # they still go on in step

    assert on_ranks(work) == [[0, 1]] * 2


def test_a_rank_that_is_gone_ends_the_work(stores: list[RankStore]) -> None:
    stores[0].wait_seconds = 0.001
    with pytest.raises(StoreFailed, match="test/0/1/1"):
        Together(stores[0], "test", 0, (0, 1)).do(lambda: 1, int)


# --- the trial ---


@dataclass
class Peers:
    """Memory that two threads share: a sum waits until both have passed theirs."""

    fails: dict[str, tuple[int, ...]] = field(default_factory=dict)
    """The ranks on which a method, or a way, fails."""
    wrong: dict[Way, tuple[float, ...]] = field(default_factory=dict)
    """The errors of a way by rank."""
    offered: tuple[tuple[Way, ...], ...] = (("one-shot", "two-shot", "multicast"),) * 2
    parts: list[Any] = field(default_factory=lambda: [None, None])
    barrier: threading.Barrier = field(default_factory=lambda: threading.Barrier(2, timeout=60.0))
    released: list[int] = field(default_factory=list)

    def add(self, rank: int, x: Tensor) -> Tensor:
        self.parts[rank] = x
        self.barrier.wait()
        total: Tensor = (self.parts[0].float() + self.parts[1].float()).to(x.dtype)
        self.barrier.wait()
        return total


@dataclass
class FakeMemory:
    """One rank's ``PeerMemory``."""

    peers: Peers
    rank: int
    calls: list[str] = field(default_factory=list)

    def _may_fail(self, name: str) -> None:
        self.calls.append(name)
        if self.rank in self.peers.fails.get(name, ()):
            raise RuntimeError(f"{name} is impossible")

    def allocate(self, gpus: Sequence[int]) -> None:
        assert list(gpus) == [0, 0]
        self._may_fail("allocate")

    def meet(self) -> tuple[Way, ...]:
        self._may_fail("meet")
        return self.peers.offered[self.rank]

    def sum(self, x: Tensor, way: Way) -> Tensor:
        self._may_fail(way)
        return self.peers.add(self.rank, x) + self.peers.wrong.get(way, (0.0, 0.0))[self.rank]

    def release(self) -> None:
        self.peers.released.append(self.rank)


def try_out(
    stores: list[RankStore], peers: Peers, *, nccl_seconds: float = 1.0, facts: AllReduceFacts = FACTS
) -> tuple[list[AllReduceChoice], list[FakeMemory]]:
    """Return the choices of two ranks; a sum over symmetric memory takes 0.1 s by the clock of their marks."""
    memories = [FakeMemory(peers, rank) for rank in range(2)]

    def work(rank: int) -> AllReduceChoice:
        clock = 0.0

        def nccl(x: Tensor) -> Tensor:
            nonlocal clock
            clock += nccl_seconds
            return peers.add(rank, x)

        def mark() -> InterpretedMark:
            return InterpretedMark(clock + 0.1 * len(memories[rank].calls))

        trial = Trial(
            together=Together(stores[rank], "all-reduce", rank, (0, 1)),
            place=rank,
            nccl=nccl,
            mark=mark,
            device=CPU,
            dtype=torch.bfloat16,
            columns=COLUMNS,
        )
        return choose_all_reduce(facts, trial, memories[rank])

    found = on_ranks(work)
    assert all(isinstance(one, AllReduceChoice) for one in found), found
    return found, memories


def test_faster_sums_are_used_on_all_ranks(stores: list[RankStore]) -> None:
    peers = Peers(offered=(("one-shot", "two-shot", "multicast"), ("one-shot", "two-shot")))
    choices, memories = try_out(stores, peers)
    assert choices[0].line == choices[1].line
    assert "over symmetric memory" in choices[0].line and "one-shot (10.0×)" in choices[0].line
    assert "multicast" not in memories[0].calls, "a way that one rank lacks"
    assert not peers.released
    for choice in choices:
        assert choice.sums is not None
        assert choice.sums.ways.sizes == tuple(tokens * COLUMNS * 2 for tokens in TOKENS)
    own = [torch.full((3, COLUMNS), float(rank + 1), dtype=torch.bfloat16) for rank in range(2)]
    sums = [choice.sums for choice in choices]
    found = on_ranks(lambda rank: sums[rank](own[rank]))  # type: ignore[misc]
    assert all(torch.equal(one, torch.full((3, COLUMNS), 3.0, dtype=torch.bfloat16)) for one in found)


def test_nccl_stays_where_it_is_faster(stores: list[RankStore]) -> None:
    peers = Peers()
    choices, _ = try_out(stores, peers, nccl_seconds=0.05)
    assert [choice.sums for choice in choices] == [None, None]
    assert choices[0].line == choices[1].line and choices[0].line.startswith("sums of ranks by NCCL (µs")
    assert sorted(peers.released) == [0, 1]


@pytest.mark.parametrize(
    ("peers", "part"),
    [
        (Peers(fails={"allocate": (1,)}), "failed: allocate is impossible (rank 1)"),
        (Peers(fails={"meet": (0,)}), "failed: meet is impossible (rank 0)"),
        (Peers(fails={"meet": (0, 1)}), "failed: meet is impossible"),
        (Peers(fails=dict.fromkeys(("one-shot", "two-shot", "multicast"), (0, 1))), "failed: no way to add"),
        (Peers(offered=(("one-shot",), ("two-shot",))), "failed: no way to add"),
    ],
    ids=["memory of one rank", "meeting of one rank", "meeting of all", "kernels", "no common way"],
)
def test_a_failure_anywhere_leaves_nccl_on_all_ranks(
    stores: list[RankStore], peers: Peers, part: str, caplog: pytest.LogCaptureFixture
) -> None:
    choices, memories = try_out(stores, peers)
    for choice in choices:
        assert (
            choice.sums is None
            and choice.line.startswith("sums of ranks by NCCL: symmetric memory")
            and part in choice.line
        )
    assert sorted(peers.released) == [0, 1]
    assert any("NCCL adds for all ranks" in record.message for record in caplog.records)
    if "allocate" in part:
        assert all("meet" not in memory.calls for memory in memories), "no rank waits for one that does not come"


@pytest.mark.parametrize("errors", [(1.0, 1.0), (0.0, 1e-2), (math.nan, math.nan)], ids=["wrong", "other bits", "NaN"])
def test_a_way_that_adds_wrongly_is_not_used(stores: list[RankStore], errors: tuple[float, ...]) -> None:
    choices, _ = try_out(stores, Peers(wrong={"one-shot": errors}))
    for choice in choices:
        assert choice.sums is not None
        assert set(choice.sums.ways.ways) == {"two-shot"}


def test_one_rank_that_refuses_is_enough(stores: list[RankStore]) -> None:
    choices, memories = try_out(stores, Peers(), facts=replace(FACTS, disabled=True))
    assert "--disable-custom-all-reduce" in choices[0].line and not memories[0].calls


# --- the group and torch ---


@dataclass
class FakeLibrary:
    """The function of torch.distributed that adds: a stand-in doubles."""

    sizes: list[int] = field(default_factory=list)

    def all_reduce(self, x: Tensor, group: Any) -> None:
        self.sizes.append(x.numel())
        x *= 2


@dataclass
class Operations:
    """The kernels of two ranks with equal parts. Each call is held against the schema of torch's operation."""

    calls: list[str] = field(default_factory=list)

    def __getattr__(self, name: str) -> Callable[..., Tensor]:
        schema = getattr(torch.ops.symm_mem, name).default._schema

        def call(*arguments: Any) -> Tensor:
            kinds = {"Tensor": Tensor, "str": str}
            assert len(arguments) == len(schema.arguments)
            for argument, declared in zip(arguments, schema.arguments, strict=True):
                assert isinstance(argument, kinds[str(declared.type)]), (name, declared.name)
            named = {declared.name: value for declared, value in zip(schema.arguments, arguments, strict=True)}
            assert (named["reduce_op"], named["group_name"]) == ("sum", "the group")
            self.calls.append(name)
            return self._add(name, named)

        return call

    def _add(self, name: str, named: dict[str, Any]) -> Tensor:
        if name == "one_shot_all_reduce_copy":
            buffer: Tensor = named["symm_buffer"]
            own: Tensor = named["local_input"]
            assert own.is_contiguous() and own.storage_offset() == 0 and own.shape == buffer.shape
            buffer.copy_(own)
            return own * 2
        if name == "two_shot_all_reduce_out":
            found: Tensor = named["output"].copy_(named["input"] * 2)
            return found
        assert name == "multimem_all_reduce_"
        found = named["input"].mul_(2)
        return found


class Memory:
    """torch's module of symmetric memory, on a CPU."""

    def __init__(self, multicast_ptr: int = 0) -> None:
        self.multicast_ptr = multicast_ptr
        self.buffer = torch.empty(0)
        self.met: list[str] = []

    def empty(self, elements: int, *, dtype: torch.dtype, device: torch.device) -> Tensor:
        self.buffer = torch.empty(elements, dtype=dtype)
        return self.buffer

    def rendezvous(self, buffer: Tensor, name: str) -> Any:
        assert buffer is self.buffer
        self.met.append(name)
        return SimpleNamespace(multicast_ptr=self.multicast_ptr)


def memory_of(memory: Memory, operations: Operations, *, unreachable: int | None = None) -> SymmetricMemory:
    return SymmetricMemory(
        SimpleNamespace(group_name="the group"),
        elements=4 * COLUMNS,
        dtype=torch.bfloat16,
        device=torch.device("cuda", 0),
        load_memory=lambda: memory,
        operations=operations,
        cuda=SimpleNamespace(can_device_access_peer=lambda own, other: other != unreachable),
    )


@pytest.mark.parametrize("way", ["one-shot", "two-shot", "multicast"])
def test_sums_outlive_the_next_one(way: Way) -> None:
    operations, memory = Operations(), Memory(multicast_ptr=1)
    peers = memory_of(memory, operations)
    peers.allocate([0, 1])
    assert way in peers.meet() and memory.met == ["the group"]
    whole = torch.ones(4 * COLUMNS + 3, dtype=torch.bfloat16)
    first = peers.sum(torch.full((2, COLUMNS), 3.0, dtype=torch.bfloat16), way)
    second = peers.sum(whole[3:].view(4, COLUMNS), way)  # not aligned to 16 bytes
    assert torch.equal(first, torch.full((2, COLUMNS), 6.0, dtype=torch.bfloat16))
    assert torch.equal(second, torch.full((4, COLUMNS), 2.0, dtype=torch.bfloat16))
    assert len(operations.calls) == 2


def test_multicast_needs_a_switch() -> None:
    peers = memory_of(Memory(), Operations())
    peers.allocate([0, 1])
    assert peers.meet() == ("one-shot", "two-shot")


def test_gpus_that_cannot_reach_each_other_are_named() -> None:
    with pytest.raises(RuntimeError, match="GPU 0 cannot read the memory of GPU 2"):
        memory_of(Memory(), Operations(), unreachable=2).allocate([0, 1, 2])


def test_a_folder_without_place_for_sockets_is_named(tmp_path: Path) -> None:
    assert folder_problem({"TMPDIR": str(tmp_path), "TMP": "/absent"}) is None
    assert folder_problem({"TMP": str(tmp_path / "absent")}) == f"cannot create sockets in {tmp_path / 'absent'}"


def test_torch_has_what_is_used() -> None:
    """Torch 2.13 and newer, which the images contain; an older one is refused by name."""
    if not has_symmetric_memory():
        assert tuple(int(part) for part in torch.__version__.split(".")[:2]) < (2, 13)
        return
    from torch.distributed import _symmetric_memory

    assert callable(_symmetric_memory.empty) and callable(_symmetric_memory.rendezvous)


def test_larger_and_other_sums_stay_with_the_library() -> None:
    library = FakeLibrary()
    group = DeviceGroup(2, distributed=library)
    operations = Operations()
    peers = memory_of(Memory(), operations)
    peers.allocate([0, 1])
    peers.meet()
    ways = WaysBySize(sizes=(2 * COLUMNS * 2,), ways=("one-shot",))
    group.faster_sums = FasterSums(memory=peers, dtype=torch.bfloat16, ways=ways)
    small = torch.ones((2, COLUMNS), dtype=torch.bfloat16)
    for x in (
        small,
        small.t(),
        torch.ones((3, COLUMNS), dtype=torch.bfloat16),
        small.float(),
        small[:1, :3],
        small[:0],
    ):
        expected = x.float() * 2
        assert torch.equal(group.all_reduce(x.clone()).float(), expected)
    assert len(operations.calls) == 2 and library.sizes == [3 * COLUMNS, 2 * COLUMNS, 3, 0]


@pytest.mark.parametrize(
    ("tensor", "line"), [(1, ""), (2, "sums of ranks by NCCL: symmetric memory is for GPUs of NVIDIA")]
)
def test_ranks_choose_after_they_have_connected(stores: list[RankStore], tensor: int, line: str) -> None:
    topology = Topology(tensor=tensor, stages=2 // tensor, nodes=1)

    def work(rank: int) -> str:
        ranks = DeviceRanks(
            topology, rank, stores[rank], device=CPU, mark=InterpretedMark, distributed=SimpleNamespace()
        )
        return ranks.choose_all_reduce(COLUMNS, torch.float32, disabled=False)

    assert on_ranks(work) == [line, line]
