"""LLMAdapters are read with their defaults, or refused with the field and the remedy."""

from typing import Any

import pytest
from specs import llmdeployment, parsed, valid_spec

from quire_common.contract.adapters_file import Placement
from quire_operator.api import AdapterSpec, Invalid


def adapter(**spec: Any) -> AdapterSpec | Invalid:
    body = {
        "apiVersion": "quire.dev/v1alpha1",
        "kind": "LLMAdapter",
        "metadata": {"name": "legal", "namespace": "team"},
        "spec": {"deploymentRef": {"name": "chat"}, "source": "s3://adapters/legal"} | spec,
    }
    return AdapterSpec.parse(body)


def test_defaults() -> None:
    spec = adapter()
    assert isinstance(spec, AdapterSpec)
    assert (spec.served_name, spec.placement, spec.deployment) == ("legal", Placement.ALL, "chat")
    assert str(spec.source) == "s3://adapters/legal"


@pytest.mark.parametrize(
    ("spec", "path", "words"),
    [
        ({"source": "pvc://disk/legal"}, "spec.source", "claim of the model"),
        ({"source": "oci://reg.example/legal:1"}, "spec.source", "image of the model"),
        ({"source": "legal"}, "spec.source", "must be"),
        ({"source": None}, "spec.source", "is required"),
        ({"deploymentRef": None}, "spec.deploymentRef.name", "is required"),
        ({"deploymentRef": {"name": "Chat"}}, "spec.deploymentRef.name", "lower-case"),
        ({"servedName": "legal-"}, "spec.servedName", "must start and end with a letter or digit"),
        ({"servedName": "a b"}, "spec.servedName", "must start and end with"),
        ({"placement": "Everywhere"}, "spec.placement", "All or OnDemand"),
        ({"rank": 8}, "spec.rank", "unknown field"),
    ],
)
def test_problems_name_the_field(spec: dict[str, Any], path: str, words: str) -> None:
    invalid = adapter(**spec)
    assert isinstance(invalid, Invalid)
    (problem,) = invalid.problems
    assert problem.path == path
    assert words in problem.message


def test_another_kind_is_refused() -> None:
    invalid = AdapterSpec.parse(llmdeployment())
    assert isinstance(invalid, Invalid)
    assert "kind: must be LLMAdapter" in str(invalid)


@pytest.mark.parametrize(
    ("spec", "problem"),
    [
        ({"engine": {"adapters": {"maxLoaded": 4, "maxInMemory": 3}}}, "spec.engine.adapters.maxInMemory"),
        ({"engine": {"adapters": {"maxRank": 0}}}, "spec.engine.adapters.maxRank"),
        ({"engine": {"extraArgs": ["--enable-lora"]}}, "spec.engine.extraArgs[0]"),
        ({"engine": {"extraArgs": ["--max-loras", "3"]}}, "spec.engine.extraArgs[0]"),
    ],
)
def test_invalid_adapter_slots_are_problems(spec: dict[str, Any], problem: str) -> None:
    invalid = parsed(**spec)
    assert isinstance(invalid, Invalid)
    assert [each.path for each in invalid.problems] == [problem]


def test_gpus_serve_adapters() -> None:
    assert valid_spec(engine={"adapters": {}}, resources={"limits": {"nvidia.com/gpu": 1}})


def test_host_memory_has_four_adapters_for_each_slot() -> None:
    slots = valid_spec(engine={"adapters": {"maxLoaded": 3}}).engine.adapters
    assert slots is not None and slots.in_memory == 12
