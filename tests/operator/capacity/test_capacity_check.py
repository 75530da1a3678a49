"""The capacity check blocks only what is known not to fit, with the figures of ``quire plan``."""

from collections.abc import Mapping
from typing import Any

import pytest
from model_configs import facts_of
from specs import valid_spec

from quire_cli.local import plan
from quire_cli.local.machine import Machine
from quire_cli.local.plan import Place
from quire_common.quantities import format_bytes
from quire_operator.api import Spec
from quire_operator.capacity.judge import ReplicaMemory, hub_source, is_let_in, judge, replica_memory
from quire_operator.kube.objects import Key, Resource

MIB = 2**20
GPU = {"limits": {"nvidia.com/gpu": 1}}
T4 = {"nvidia.com/gpu.memory": "15360", "nvidia.com/gpu.product": "Tesla-T4", "pool": "small"}
H100 = {"nvidia.com/gpu.memory": "81559", "nvidia.com/gpu.product": "NVIDIA-H100-80GB-HBM3", "pool": "large"}
AMD = {"limits": {"amd.com/gpu": 1}}
MI300X = {"amd.com/gpu.vram": "192G", "amd.com/gpu.product-name": "AMD_Instinct_MI300X"}
MACHINE = Machine(cpus=1, memory_bytes=1, gpu_memory_bytes=(), multiplies_bfloat16=True)


def spec_of(source: str = "hf://a/b", **spec: Any) -> Spec:
    return valid_spec(model={"source": source} | spec.pop("model", {}), **spec)


def selecting(**labels: str) -> dict[str, Any]:
    return {"resources": GPU, "podTemplate": {"spec": {"nodeSelector": labels}}}


@pytest.mark.parametrize(
    ("spec", "nodes", "expected"),
    [
        ({}, None, None),
        ({"resources": {"limits": {"memory": "8Gi"}}}, None, 8192),
        ({"resources": {"requests": {"memory": "8Gi"}}}, None, None),
        ({"resources": GPU}, None, None),
        ({"resources": GPU}, [], None),
        ({"resources": GPU}, [{}, {"nvidia.com/gpu.memory": "much"}, {"nvidia.com/gpu.memory": "-1"}], None),
        ({"resources": GPU}, [T4, H100, {}], 81559),
        ({"resources": GPU}, [MI300X], None),
        ({"resources": AMD}, [T4, H100, MI300X], 192 << 10),
        ({"resources": AMD}, [T4, {"amd.com/gpu.vram": "much"}, {"amd.com/gpu.vram": "-1G"}], None),
        ({"resources": {"limits": {"nvidia.com/gpu": 1, "memory": "1Gi"}}}, [T4], 15360),
        ({"resources": {"limits": {"nvidia.com/gpu.shared": 1, "memory": "1Gi"}}}, [T4], 15360),
        *(
            ({"resources": {"limits": {f"nvidia.com/mig-{profile}": 1, "memory": "1Gi"}}}, [T4], size)
            for profile, size in (
                ("3g.40gb", 40 << 10),
                ("1g.10gb.me", 10 << 10),
                ("1c.3g.40gb", 40 << 10),
                ("1g.5gb.shared", 5 << 10),
                ("new", None),
            )
        ),
        ({"resources": {"limits": {"nvidia.com/gpu": 4}}, "parallelism": {"tensor": 4}}, [T4], 4 * 15360),
        ({"resources": GPU, "parallelism": {"pipeline": 2, "nodes": 2}}, [T4], 2 * 15360),
        (selecting(pool="small"), [T4, H100], 15360),
        (selecting(pool="to-be-made"), [T4, H100], None),
        (
            {
                "resources": {"limits": {"memory": "1Gi"}},
                "podTemplate": {
                    "spec": {"containers": [{"name": "engine", "resources": {"limits": {"memory": "9Gi"}}}]}
                },
            },
            None,
            None,
        ),
    ],
)
def test_replica_memory_is_derived_or_unknown(
    spec: Mapping[str, Any], nodes: list[dict[str, str]] | None, expected: int | None
) -> None:
    memory = replica_memory(spec_of(**spec), nodes)
    assert (memory and memory.size_bytes // MIB) == expected


@pytest.mark.parametrize("mebibytes", [1024, 15360, 23028, 81559])
@pytest.mark.parametrize("on_gpu", [True, False])
@pytest.mark.parametrize("engine", [{}, {"maxModelLength": 4096}, {"dtype": "Float32"}, {"kvCache": {"size": "60Gi"}}])
def test_capacity_decision_equals_that_of_quire_plan(mebibytes: int, on_gpu: bool, engine: dict[str, Any]) -> None:
    resources = GPU if on_gpu else {"limits": {"memory": f"{mebibytes}Mi"}}
    spec = spec_of(resources=resources, engine=engine)
    memory = replica_memory(spec, [{"nvidia.com/gpu.memory": str(mebibytes)}])
    assert memory is not None and memory.on_gpu == on_gpu
    place = Place(label="", memory_bytes=mebibytes * MIB, on_gpu=on_gpu)
    (planned,) = plan.answers(spec, facts_of(), [place], machine=MACHINE)

    refused = judge(spec, facts_of(), memory)

    assert (refused is None) == planned.fits
    if refused is not None:
        assert refused.reason == ("InsufficientGPUMemory" if on_gpu else "InsufficientMemory")
        assert not isinstance(planned.outcome, plan.Fits)
        needed = (planned.outcome.needed_bytes, planned.needs.weight_bytes, planned.needs.workspace_bytes)
        assert all(format_bytes(size) in refused.message for size in needed)


def test_capacity_message_has_need_limit_and_remedy() -> None:
    spec = spec_of(resources=GPU, engine={"maxModelLength": 8192})
    memory = replica_memory(spec, [T4])
    assert memory is not None
    refused = judge(spec, facts_of(), memory)
    assert refused is not None
    assert refused.message == (
        "a replica needs 19.9 GiB and the largest GPU of this cluster's nodes (Tesla-T4) is 15 GiB, of which it may "
        "fill 90 %: weights 15 GiB (bfloat16), working space 1.93 GiB, KV cache 1 GiB for one sequence of 8,192 "
        "tokens; give a replica 19.9 GiB, or set spec.parallelism.tensor and the GPUs in spec.resources to 2"
    )


def test_gpus_of_a_replica_are_counted_together() -> None:
    def refused(gpus: int, **engine: Any) -> str | None:
        resources = {"limits": {"nvidia.com/gpu": gpus}}
        spec = spec_of(resources=resources, parallelism={"tensor": gpus}, engine={"maxModelLength": 8192} | engine)
        found = judge(spec, facts_of(), replica_memory(spec, [T4]))
        return None if found is None else found.message

    assert refused(2) is None
    message = refused(2, maxModelLength=131072)
    assert message is not None and "the memory of 2 GPUs like the largest GPU of this cluster's nodes" in message
    assert "set spec.parallelism.tensor and the GPUs in spec.resources to 4" in message
    resources = {"limits": {"nvidia.com/gpu": 1}}
    stages = spec_of(resources=resources, parallelism={"pipeline": 2, "nodes": 2}, engine={"maxModelLength": 131072})
    found = judge(stages, facts_of(), replica_memory(stages, [T4]))
    assert found is not None and found.reason == "InsufficientGPUMemory"
    assert "the memory of 2 GPUs like" in found.message and "spec.parallelism" not in found.message
    adapted = refused(1, adapters={})
    assert adapted is not None and "spec.parallelism.tensor" not in adapted


@pytest.mark.parametrize("memory", [None, ReplicaMemory(size_bytes=2**40, on_gpu=False, where="it")])
def test_a_model_that_cannot_be_divided_is_refused(memory: ReplicaMemory | None) -> None:
    refused = judge(spec_of(parallelism={"tensor": 3}), facts_of(), memory)
    assert refused is not None and refused.reason == "InvalidSpec"
    assert refused.message.startswith("spec.parallelism.tensor: must divide the 32 attention heads of the model, got 3")
    assert judge(spec_of(parallelism={"tensor": 16}), facts_of(), memory) is None


@pytest.mark.parametrize(
    ("spec", "readable"),
    [
        ({"source": "hf://a/b@main"}, True),
        ({"source": "hf://a/b", "model": {"credentials": {"secretName": "hf"}}}, False),
        ({"source": "pvc://models/llama"}, False),
        ({"source": "file:///models/llama"}, False),
        ({"source": "s3://bucket/llama?endpoint=http://10.0.0.1"}, False),
        ({"source": "oci://10.0.0.1:5000/llama:1"}, False),
        (
            {
                "podTemplate": {
                    "spec": {"containers": [{"name": "engine", "env": [{"name": "HF_ENDPOINT", "value": "x"}]}]}
                }
            },
            False,
        ),
    ],
)
def test_only_public_hub_models_are_read(spec: dict[str, Any], readable: bool) -> None:
    assert (hub_source(spec_of(**spec)) is not None) == readable


@pytest.mark.parametrize(
    ("generation", "reason", "let_in"),
    [
        (2, "Starting", True),
        (2, "InsufficientGPUMemory", False),
        (2, "InsufficientMemory", False),
        (1, "Serving", False),
    ],
)
def test_applied_spec_is_not_checked_again(generation: int, reason: str, let_in: bool) -> None:
    ready = {"type": "Ready", "observedGeneration": generation, "reason": reason}
    resource = Resource(
        key=Key("prod", "chat"),
        uid="u",
        version="1",
        generation=2,
        deleting=False,
        body={},
        status={"conditions": [{"type": "Degraded"}, ready]},
        created="",
    )
    assert is_let_in(resource) == let_in


def test_group_has_the_memory_of_all_its_pods() -> None:
    """The weights of 15 GiB fit two pods of 12 GiB together, and not one of them."""
    resources = {"limits": {"memory": "12Gi"}}
    engine = {"maxModelLength": 1024}
    one = spec_of(resources=resources, engine=engine, parallelism={"tensor": 2})
    two = spec_of(resources=resources, engine=engine, parallelism={"tensor": 2, "nodes": 2})
    alone = judge(one, facts_of(), replica_memory(one, None))
    assert alone is not None and alone.reason == "InsufficientMemory"
    assert judge(two, facts_of(), replica_memory(two, None)) is None

    small = spec_of(resources={"limits": {"memory": "6Gi"}}, engine=engine, parallelism={"tensor": 2, "nodes": 2})
    refused = judge(small, facts_of(), replica_memory(small, None))
    assert refused is not None and "that of its 2 pods together" in refused.message
