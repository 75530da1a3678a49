"""A moving model source: resolved once, stored in status, passed to pods, and the versions that pods report."""

from dataclasses import replace
from typing import Any

import pytest

from quire_common.contract.engine import FETCHED_VERSION
from quire_operator.api import HubSource
from quire_operator.capacity.hub import HubReader, ModelUnknown
from quire_operator.kube.objects import Ref
from quire_operator.kube.trimming import trim_pod, trim_resource

FIRST, SECOND = "1" * 40, "2" * 40
BRANCH = {"source": "hf://org/m@main"}


class Hub:
    """The part of ``HubFacts`` that resolves."""

    def __init__(self) -> None:
        self.answer: str | ModelUnknown = FIRST
        self.asked = 0

    async def commit(self, source: HubSource) -> str:
        self.asked += 1
        if isinstance(self.answer, ModelUnknown):
            raise self.answer
        return self.answer


@pytest.fixture
def moving(world: Any) -> Any:
    """Return the world with an operator that resolves sources."""
    world.hub = Hub()
    start_resolving(world)
    return world


def start_resolving(world: Any) -> None:
    world.start(hub=HubReader(world.hub, now=world.clock))


def fetched(world: Any) -> str:
    """Return the source that pods download."""
    pod = world.cluster.manifests[Ref("Deployment", "chat")].body["spec"]["template"]["spec"]
    (fetch,) = pod["initContainers"]
    assert isinstance(fetch["args"][0], str)
    return fetch["args"][0]


def refresh(world: Any, value: str) -> None:
    (key,) = world.cluster.resources
    resource = world.cluster.resources[key]
    world.cluster.resources[key] = replace(resource, refresh_model=value, version=world.cluster._next())


async def test_a_branch_is_resolved_once_and_stored_before_pods_exist(moving: Any) -> None:
    moving.apply(model=BRANCH)
    written = await moving.settle()
    assert written.index("status") < written.index("create Deployment chat")
    assert moving.cluster.statuses[0]["model"] == {"source": "hf://org/m@main", "revision": FIRST}
    assert fetched(moving) == f"hf://org/m@{FIRST}"
    assert moving.status["model"]["revision"] == FIRST and moving.hub.asked == 1


async def test_a_push_restarts_no_replica(moving: Any) -> None:
    moving.apply(model=BRANCH)
    await moving.settle()
    moving.hub.answer = SECOND
    moving.apply(model=BRANCH, replicas=3)
    await moving.settle()
    start_resolving(moving)
    await moving.settle()
    assert (fetched(moving), moving.hub.asked) == (f"hf://org/m@{FIRST}", 1)


@pytest.mark.parametrize("way", ["source", "annotation"])
async def test_another_source_or_annotation_resolves_again(moving: Any, way: str) -> None:
    moving.apply(model=BRANCH)
    await moving.settle()
    moving.hub.answer = SECOND
    if way == "source":
        moving.apply(model={"source": "hf://org/m@next"})
    else:
        refresh(moving, "again")
    await moving.settle()
    assert fetched(moving) == f"hf://org/m@{SECOND}"
    await moving.settle()
    assert moving.hub.asked == 2


@pytest.mark.parametrize("unreachable", [False, True])
async def test_unresolved_branch_is_left_to_the_pods(moving: Any, unreachable: bool) -> None:
    moving.hub.answer = ModelUnknown("no", unreachable=unreachable)
    moving.apply(model=BRANCH)
    await moving.settle()
    moving.hub.answer = FIRST
    moving.clock.time += 3600
    moving.apply(model=BRANCH, replicas=2)
    await moving.settle()
    assert fetched(moving) == "hf://org/m@main", "a late answer would restart all replicas"
    assert moving.status["model"] == {"source": "hf://org/m@main"} and moving.hub.asked == 1


@pytest.mark.parametrize("source", [f"hf://org/m@{SECOND}", "s3://bucket/m", "oci://registry.example/m:1"])
async def test_only_branches_of_a_hub_are_resolved(moving: Any, source: str) -> None:
    moving.apply(model={"source": source})
    await moving.settle()
    assert moving.hub.asked == 0 and "model" not in moving.status


async def test_an_invalid_spec_keeps_the_revision(moving: Any) -> None:
    moving.apply(model=BRANCH)
    await moving.settle()
    moving.apply(model=BRANCH, replicas=-1)
    await moving.settle()
    moving.apply(model=BRANCH)
    await moving.settle()
    assert moving.status["model"]["revision"] == FIRST and moving.hub.asked == 1


async def test_different_versions_in_pods_are_reported(moving: Any, pod: Any) -> None:
    moving.apply(model={"source": "s3://bucket/m"})
    await moving.settle()
    moving.run_replicas()
    moving.cluster.pods = {name: replace(pod(name), model_version=name) for name in ("a", "b")}
    await moving.settle()
    assert moving.status["model"] == {"source": "s3://bucket/m", "podVersions": ["a", "b"]}
    assert moving.condition("Degraded") == "True MixedModelVersions"
    moving.cluster.pods = {name: replace(pod(name), model_version="b", version="9999") for name in ("a", "b")}
    await moving.settle()
    assert moving.condition("Degraded") == "False AsExpected"


@pytest.mark.parametrize(
    ("ended", "version"),
    [
        ({"exitCode": 0, "message": f"{FETCHED_VERSION}abc"}, "abc"),
        ({"exitCode": 1, "message": f"{FETCHED_VERSION}abc"}, ""),
        ({"exitCode": 0, "message": "done"}, ""),
        ({}, ""),
    ],
)
def test_pod_version_is_read_from_its_termination_message(ended: dict[str, Any], version: str) -> None:
    status = {"initContainerStatuses": [{"name": "fetch-model", "state": {"terminated": ended}}]}
    assert trim_pod({"metadata": {"name": "a"}, "status": status}).model_version == version


def test_the_annotation_is_read() -> None:
    metadata = {"name": "chat", "namespace": "prod", "annotations": {"quire.dev/refresh-model": "2"}}
    assert trim_resource({"metadata": metadata, "spec": {}}).refresh_model == "2"
