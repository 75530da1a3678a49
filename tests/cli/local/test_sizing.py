"""The GPUs of this machine for each LLMDeployment of a file."""

from dataclasses import replace
from typing import Any

import pytest
from specs import valid_spec

from quire_cli.errors import CapacityProblem
from quire_cli.local.deployment import LocalDeployment
from quire_cli.local.machine import Machine
from quire_cli.local.plan import Share, share_of
from quire_operator.api import Spec


def spec_of(name: str, *, gpus: int = 0, **spec: Any) -> Spec:
    limits = {"resources": {"limits": {"nvidia.com/gpu": gpus}}} if gpus else {}
    return valid_spec(name=name, model={"source": "hf://a/b"}, **limits, **spec)


def machine(gpus: int) -> Machine:
    return Machine(cpus=8, memory_bytes=2**36, gpu_memory_bytes=(80, 70, 60, 90)[:gpus], multiplies_bfloat16=True)


SPECS = (
    spec_of("one", gpus=1),
    spec_of("cpu", replicas=2),
    spec_of("two", gpus=1, replicas=2),
    spec_of("asleep", gpus=1, replicas=0),
)


def test_each_llmdeployment_has_separate_gpus() -> None:
    shares = [share_of(spec, SPECS, machine(4)) for spec in SPECS]
    assert [share.gpus for share in shares] == [(0,), (), (1, 2), (3,)]
    assert [share.on_gpu for share in shares] == [True, False, True, True]
    assert shares[0].memory_bytes == 60
    assert (shares[1].memory_bytes, shares[1].threads) == (2**35, 4)


def test_gpus_of_both_kinds_are_counted_apart() -> None:
    on_amd = spec_of("amd", resources={"limits": {"amd.com/gpu": 1}})
    specs = (*SPECS, on_amd)
    both = replace(machine(4), amd_memory_bytes=(192, 256))
    assert share_of(on_amd, specs, both) == Share(memory_bytes=192, threads=1, gpus=(0,))
    assert [share_of(spec, specs, both).gpus for spec in SPECS] == [(0,), (), (1, 2), (3,)]
    with pytest.raises(CapacityProblem, match="need 1 GPU .spec.resources., but /sys/class/drm shows none"):
        share_of(on_amd, specs, machine(4))


def test_each_rank_has_a_gpu_and_a_thread() -> None:
    divided = spec_of("divided", gpus=2, replicas=2, parallelism={"tensor": 2})
    six = replace(machine(0), gpu_memory_bytes=(80,) * 6)
    specs = (SPECS[0], divided)
    assert share_of(divided, specs, six) == Share(memory_bytes=160, threads=2, gpus=(1, 2, 3, 4))
    with pytest.raises(CapacityProblem, match="the replicas need 5 GPUs .spec.resources., but nvidia-smi shows only 4"):
        share_of(divided, specs, machine(4))


def test_pods_of_a_replica_have_their_gpus_on_one_machine() -> None:
    group = spec_of("group", gpus=2, replicas=1, parallelism={"tensor": 2, "pipeline": 2, "nodes": 2})
    six = replace(machine(0), gpu_memory_bytes=(80,) * 6)
    assert share_of(group, (SPECS[0], group), six) == Share(memory_bytes=320, threads=4, gpus=(1, 2, 3, 4))


@pytest.mark.parametrize(
    ("gpus", "per_replica", "expected"),
    [((), 1, [(), ()]), ((3, 4), 1, [(3,), (4,), (3,)]), ((1, 2, 3, 4), 2, [(1, 2), (3, 4), (1, 2)])],
)
def test_replicas_use_separate_gpus(gpus: tuple[int, ...], per_replica: int, expected: list[tuple[int, ...]]) -> None:
    deployment = deployed(gpus, per_replica)
    assert [deployment.gpus_of(number) for number in range(len(expected))] == expected


def deployed(gpus: tuple[int, ...], per_replica: int = 1) -> LocalDeployment:
    return LocalDeployment(
        name="chat",
        served_name="chat",
        command=lambda port: [],
        kill_grace_seconds=1.0,
        gpus=gpus,
        gpus_per_replica=per_replica,
    )


@pytest.mark.parametrize(
    ("num_gpus", "per_replica", "staying", "draining", "expected"),
    [
        (2, 1, [], [], [0, 1, 2]),
        (0, 1, [0, 2], [1], [3, 4]),
        # GPU 1 becomes free, GPU 0 does not.
        (2, 1, [0], [1], [3]),
        (4, 2, [0], [1], [3]),
        (2, 1, [1], [0, 2], [4]),
        # GPU 2 is idle.
        (3, 1, [1], [0], [2, 3]),
        # The lowest free number belongs to a GPU that a staying replica fills.
        (2, 1, [3], [], [0]),
        (2, 1, [2], [0], [1, 3]),
        # All GPUs are in use, so that two replicas share one.
        (2, 1, [0, 1], [2], [3, 4]),
    ],
)
def test_new_replica_gets_the_gpus_with_the_fewest_replicas(
    num_gpus: int, per_replica: int, staying: list[int], draining: list[int], expected: list[int]
) -> None:
    deployment = deployed(tuple(range(num_gpus)), per_replica)
    assert deployment.new_numbers(len(expected), staying=staying, draining=draining) == expected
    assert deployment.new_numbers(-1, staying=staying, draining=draining) == []


@pytest.mark.parametrize(("tensor", "threads"), [(1, 8), (2, 8), (16, 16)])
def test_each_rank_has_a_thread(tensor: int, threads: int) -> None:
    spec = spec_of("chat", parallelism={"tensor": tensor})
    assert share_of(spec, (spec,), machine(0)).threads == threads


@pytest.mark.parametrize(("gpus", "has"), [(0, "none"), (3, "only 3")])
def test_replicas_need_a_gpu_each(gpus: int, has: str) -> None:
    with pytest.raises(CapacityProblem, match=f"the replicas need 4 GPUs .spec.resources., but nvidia-smi shows {has}"):
        share_of(SPECS[0], SPECS, machine(gpus))
