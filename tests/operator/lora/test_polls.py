"""The polls of replicas with adapters: invalid reports, and pods that have not read the newest list."""

import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from quire_common.served_names import NameScope
from quire_operator.deployment.store import Store
from quire_operator.kube.errors import ClusterError, NotFound, Unavailable
from quire_operator.kube.objects import Key, Pod, Resource
from quire_operator.kube.trimming import trim_adapter, trim_resource
from quire_operator.lora.controller import Adapters

KEY = Key("prod", "chat")


class Replica:
    """``Pages`` of a replica."""

    page = b'{"adapters": [], "slots": {"total": 2, "used": 0}, "loads_total": 0}'

    async def answer(self, url: str) -> bytes | None:
        return self.page


def adapter(*, version: str = "1", status: Any = None) -> Resource:
    metadata = {"name": "legal", "namespace": "prod", "uid": "a", "resourceVersion": version, "generation": 1}
    spec = {"deploymentRef": {"name": "chat"}, "source": "s3://adapters/legal"}
    return trim_adapter({"metadata": metadata, "spec": spec, "status": status or {}})


@pytest.fixture
async def polled(world: Any, pod: Callable[..., Pod]) -> Any:
    """Return a world with a replica that serves adapters, and the loop that polls it."""
    store = Store()
    metadata = {"name": "chat", "namespace": "prod", "uid": "u", "resourceVersion": "1", "generation": 1}
    engine = {"adapters": {"maxRank": 8, "maxLoaded": 2}}
    body = {"metadata": metadata, "spec": {"model": {"source": "file:///m"}, "engine": engine}}
    store.put_resource(trim_resource({"apiVersion": "quire.dev/v1alpha1", "kind": "LLMDeployment"} | body))
    store.put_pod(KEY, pod("chat-1"))
    world.replica, world.known = Replica(), store
    world.cluster.adapters = {Key("prod", "legal"): adapter()}
    world.adapters = Adapters(replace(world.view, store=store), reader=world.replica, scope=lambda: NameScope.CLUSTER)
    await world.adapters.resync()
    return world


def condition(world: Any, kind: str) -> str:
    (found,) = [each for each in world.cluster.statuses[-1]["conditions"] if each["type"] == kind]
    return f"{found['status']} {found['reason']}"


@pytest.mark.parametrize(
    "answer",
    [
        *(b"", b"[]", b"{", b"[" * 100_000),
        b'{"adapters": ["legal"], "slots": {"total": 1, "used": 1}, "loads_total": 0}',
        b'{"adapters": [], "slots": {"total": 1e999, "used": 1}, "loads_total": 0}',
    ],
    ids=["empty", "list", "half", "deep", "adapter is a text", "infinite"],
)
async def test_invalid_report_counts_as_no_answer(polled: Any, answer: bytes) -> None:
    polled.replica.page = answer
    await polled.adapters.poll()
    assert condition(polled, "Ready") == "False Loading"
    assert polled.cluster.annotated == [], "it may be an image that knows no adapters"


async def test_report_of_the_adapter_makes_it_ready(polled: Any) -> None:
    (entry,) = polled.adapters.entries(KEY)
    known = {"name": "legal", "generation": entry.generation, "state": "Loaded"}
    polled.replica.page = json.dumps({"adapters": [known], "slots": {"total": 2, "used": 1}, "loads_total": 1}).encode()
    await polled.adapters.poll()
    assert (condition(polled, "Ready"), condition(polled, "Loaded")) == ("True Serving", "True Loaded")
    assert polled.cluster.annotated == []


@pytest.mark.parametrize(
    ("errors", "times"), [([], 1), ([NotFound("gone")], 1), ([Unavailable("no answer")], 2)], ids=str
)
async def test_pod_is_hurried_once_unless_the_write_failed(polled: Any, errors: list[ClusterError], times: int) -> None:
    polled.cluster.errors["annotate chat-1"] = errors
    for _ in range(3):
        await polled.adapters.poll()
    assert polled.cluster.annotated == ["chat-1"] * times


async def test_pod_that_is_gone_is_forgotten(polled: Any, pod: Callable[..., Pod]) -> None:
    """Show it by a pod with the same uid, which is hurried again."""
    await polled.adapters.poll()
    polled.known.drop_pod(KEY, "chat-1", pod("chat-1").uid)
    await polled.adapters.poll()
    polled.known.put_pod(KEY, pod("chat-1"))
    await polled.adapters.poll()
    assert polled.cluster.annotated == ["chat-1"] * 2
