"""The tensor group of GPUs: NCCL between real ones, sums and columns, and the parts that torch may lack."""

import os
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from quire_engine.config import ParallelOptions
from quire_engine.runner.parallel.checks import device_problems
from quire_engine.runner.parallel.device_group import DeviceGroup, FoundCollectives, collectives_problem

FOUND = FoundCollectives(torch_version="2.11.0+cu130", nccl=True, gloo=True)


@dataclass
class FakeDistributed:
    """The functions of torch.distributed. ``others`` are what the ranks after the first one pass on."""

    others: tuple[torch.Tensor, ...] = ()
    joined: dict[str, Any] = field(default_factory=dict)
    store: tuple[str, int] | None = None
    left: list[str] = field(default_factory=list)
    group: SimpleNamespace = field(init=False)

    def __post_init__(self) -> None:
        self.group = SimpleNamespace(WORLD=SimpleNamespace(abort=lambda: self.left.append("nccl")))

    def FileStore(self, path: str, ranks: int) -> Any:
        self.store = (path, ranks)
        return SimpleNamespace(set_timeout=lambda timeout: None)

    def init_process_group(self, backend: str, **options: Any) -> None:
        self.joined = {"backend": backend, **options}

    def all_reduce(self, x: torch.Tensor, group: Any) -> None:
        for other in self.others:
            x += other

    def all_gather(self, found: list[torch.Tensor], x: torch.Tensor, group: Any) -> None:
        for target, source in zip(found, (x, *self.others), strict=True):
            target.copy_(source)

    def destroy_process_group(self) -> None:
        self.left.append("gloo")


def group_of(fake: FakeDistributed, device: str = "cpu", **options: Any) -> DeviceGroup:
    return DeviceGroup(
        os.memfd_create("store"),
        rank=0,
        ranks=1 + len(fake.others),
        device=torch.device(device),
        distributed=fake,
        **options,
    )


@pytest.mark.parametrize(("device", "backend"), [("cuda:1", "nccl"), ("cpu", "gloo")])
def test_real_gpus_meet_by_nccl_over_loopback(device: str, backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME"):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    fake = FakeDistributed(others=(torch.zeros(1),))
    group = group_of(fake, device)
    group.connect(5.0)
    assert fake.joined["backend"] == backend
    assert fake.joined["device_id"] == (torch.device(device) if backend == "nccl" else None)
    assert (fake.joined["rank"], fake.joined["world_size"]) == (0, 2)
    assert fake.store is not None and fake.store[0].startswith("/proc/self/fd/") and fake.store[1] == 2
    assert os.environ["NCCL_SOCKET_IFNAME"] == os.environ["GLOO_SOCKET_IFNAME"] == "lo"
    group.close()
    group.close()
    assert fake.left == [backend]


def test_a_group_that_never_met_leaves_nothing() -> None:
    fake = FakeDistributed()
    group_of(fake).close()
    assert not fake.left


@pytest.mark.parametrize("in_order", [False, True])
def test_ranks_are_added(in_order: bool) -> None:
    others = tuple(torch.full((2, 3), float(value), dtype=torch.bfloat16) for value in (2, 4))
    group = group_of(FakeDistributed(others=others), in_order=in_order)
    found = group.all_reduce(torch.ones((2, 3), dtype=torch.bfloat16))
    assert found.dtype == torch.bfloat16 and torch.equal(found, torch.full((2, 3), 7.0, dtype=torch.bfloat16))
    group.close()


def test_sums_in_order_round_once() -> None:
    """256 and two halves of a step: each alone would be lost in bfloat16."""
    others = tuple(torch.ones(1, dtype=torch.bfloat16) for _ in range(2))
    group = group_of(FakeDistributed(others=others), in_order=True)
    assert group.all_reduce(torch.full((1,), 256.0, dtype=torch.bfloat16)).item() == 258.0
    group.close()


def test_shares_of_different_widths_are_joined() -> None:
    others = (torch.tensor([[3.0, 4.0, 5.0], [13.0, 14.0, 15.0]]),)
    group = group_of(FakeDistributed(others=others))
    found = group.gather(torch.tensor([[1.0, 2.0], [11.0, 12.0]]), (2, 3))
    assert found.tolist() == [[1.0, 2.0, 3.0, 4.0, 5.0], [11.0, 12.0, 13.0, 14.0, 15.0]]
    group.close()


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
