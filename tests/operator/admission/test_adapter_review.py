"""The review of an LLMAdapter: its own errors are refused, errors that other objects may fix are warnings."""

import asyncio
from collections.abc import Mapping
from typing import Any

import pytest
from specs import llmdeployment

from quire_common.served_names import NameScope
from quire_operator.admission import ALLOWED, AdapterReviewer, Review
from quire_operator.kube.objects import Key, Resource
from quire_operator.kube.trimming import trim_adapter, trim_resource
from quire_operator.lora.placement import Listing, deployment_key, listings


def body(name: str = "legal", spec: Mapping[str, Any] | None = None, **metadata: Any) -> dict[str, Any]:
    given = {"deploymentRef": {"name": "chat"}, "source": "hf://org/legal"} if spec is None else dict(spec)
    return {
        "apiVersion": "quire.dev/v1alpha1",
        "kind": "LLMAdapter",
        "metadata": {
            "name": name,
            "namespace": "shop",
            "uid": f"uid-{name}",
            "creationTimestamp": "2026-02-01T00:00:00Z",
            **metadata,
        },
        "spec": given,
    }


def model(**engine: Any) -> Resource:
    return trim_resource(llmdeployment({"namespace": "shop", "uid": "uid-chat"}, engine=engine))


def review(
    new: Mapping[str, Any],
    old: Mapping[str, Any] | None = None,
    *,
    deployment: Resource | None = None,
    others: tuple[Mapping[str, Any], ...] = (),
) -> Review:
    def preview(resource: Resource) -> Listing | None:
        assert deployment_key(resource) == Key("shop", "chat")
        adapters = [*map(trim_adapter, others), resource]
        found = listings(adapters, deployment, lambda name: (), scope=NameScope.CLUSTER, now=1_800_000_000.0)
        return next((listing for listing in found if listing.resource is resource), None)

    return asyncio.run(AdapterReviewer(preview).review(new, old))


ROOM = model(adapters={"maxRank": 8})


def test_servable_adapter_is_allowed() -> None:
    assert review(body(), deployment=ROOM) == ALLOWED


@pytest.mark.parametrize(
    ("spec", "path"),
    [
        ({"source": "hf://org/legal"}, "spec.deploymentRef.name"),
        ({"deploymentRef": {"name": "chat"}}, "spec.source"),
        ({"deploymentRef": {"name": "chat"}, "source": "pvc://claim/legal"}, "spec.source"),
        ({"deploymentRef": {"name": "chat"}, "source": "file://./../legal"}, "spec.source"),
        ({"deploymentRef": {"name": "chat"}, "source": "hf://org/legal", "rank": 8}, "spec.rank"),
        ({"deploymentRef": {"name": "chat"}, "source": "hf://org/legal", "placement": "Some"}, "spec.placement"),
    ],
)
def test_problems_of_the_adapter_itself_are_refused(spec: Mapping[str, Any], path: str) -> None:
    refused = review(body(spec=spec), deployment=ROOM)
    assert [problem.path for problem in refused.problems] == [path]


def test_an_adapter_on_a_claim_is_refused_with_the_remedy() -> None:
    on_a_claim = {"deploymentRef": {"name": "chat"}, "source": "pvc://claim/legal"}
    assert "file://./folder" in review(body(spec=on_a_claim), deployment=ROOM).message


@pytest.mark.parametrize(
    ("deployment", "others", "reason"),
    [
        (None, (), "DeploymentNotFound"),
        (model(), (), "AdaptersDisabled"),
        (model(adapters={"maxRank": 0}), (), "DeploymentInvalid"),
        (
            ROOM,
            (
                body(
                    "older",
                    {"deploymentRef": {"name": "chat"}, "source": "hf://o/a", "servedName": "legal"},
                    creationTimestamp="2026-01-01T00:00:00Z",
                ),
            ),
            "NameTaken",
        ),
    ],
)
def test_problems_with_other_objects_are_warnings(
    deployment: Resource | None, others: tuple[Mapping[str, Any], ...], reason: str
) -> None:
    found = review(body(), deployment=deployment, others=others)
    assert found.problems == ()
    assert [warning.partition(":")[0] for warning in found.warnings] == [reason]


def test_writes_without_a_new_spec_are_always_allowed() -> None:
    wrong = body(spec={"source": "pvc://claim/legal"})
    assert review(body(spec=wrong["spec"], labels={"a": "b"}), wrong) == ALLOWED
    assert review(body(spec=wrong["spec"], deletionTimestamp="2026-01-01T00:00:00Z")) == ALLOWED


def test_no_warnings_before_all_objects_are_listed() -> None:
    assert asyncio.run(AdapterReviewer(lambda resource: None).review(body(), None)) == ALLOWED
