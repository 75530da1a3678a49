"""The EndpointSlice that leads the Service of an LLMDeployment without ready replicas to the gateways."""

from dataclasses import replace
from typing import Any

import pytest
import status_views
from specs import valid_spec

from quire_common.contract.kubernetes import LABEL_DEPLOYMENT
from quire_operator.domain.cluster_state.observed import Pod
from quire_operator.domain.manifests.wake_route import GatewayAddress, WakeRoute, needs_route, wake_route

NOW = 1_767_225_600.0  # 2026-01-01T00:00:00Z
LONG_AGO, JUST_NOW = "2025-12-31T23:59:00Z", "2025-12-31T23:59:58Z"
ZERO: dict[str, Any] = {"minReplicas": 0, "maxReplicas": 2}


def pod(*, ready: bool = True, since: str = LONG_AGO, deleting: bool = False) -> Pod:
    return replace(status_views.pod(ready=ready), deleting=deleting, ready_changed=since)


@pytest.mark.parametrize(
    ("pods", "desired", "needed"),
    [
        ([], 0, True),
        ([], None, True),
        ([], 1, True),
        ([pod(ready=False)], 1, True),
        ([pod(since=JUST_NOW)], 1, True),
        ([pod(deleting=True)], 1, True),
        ([pod()], 1, False),
        ([pod(since="")], 1, False),
        ([pod(ready=False), pod()], 2, False),
        ([pod()], 0, True),
    ],
)
def test_a_route_exists_until_a_replica_has_been_ready(pods: list[Pod], desired: int | None, needed: bool) -> None:
    assert needs_route(valid_spec(autoscaling=ZERO), pods, desired_replicas=desired, now=NOW) is needed


@pytest.mark.parametrize(
    "spec",
    [
        {"replicas": 0},
        {"autoscaling": {"minReplicas": 1, "maxReplicas": 2}},
        {"autoscaling": ZERO | {"mode": "Recommend"}},
    ],
)
def test_deployment_that_cannot_scale_to_zero_has_no_wake_route(spec: dict[str, Any]) -> None:
    assert not needs_route(valid_spec(**spec), [], desired_replicas=0, now=NOW)


def test_a_schedule_that_reaches_zero_counts() -> None:
    night = {"cron": "0 22 * * *", "duration": "9h", "minReplicas": 0}
    spec = valid_spec(autoscaling={"minReplicas": 1, "maxReplicas": 2, "schedules": [night]})
    assert needs_route(spec, [], desired_replicas=0, now=NOW)


def route(*addresses: tuple[str, int]) -> WakeRoute:
    return wake_route(valid_spec(autoscaling=ZERO), "uid-1", [GatewayAddress(ip, port) for ip, port in addresses])


def test_endpoint_slice_belongs_to_service_and_no_replica() -> None:
    body: Any = route(("10.0.0.2", 8001), ("10.0.0.1", 8001)).body
    labels = body["metadata"]["labels"]
    assert labels["kubernetes.io/service-name"] == "chat"
    assert labels["endpointslice.kubernetes.io/managed-by"] == "quire-operator"
    assert LABEL_DEPLOYMENT not in labels, "a gateway would take itself for a replica"
    assert [endpoint["addresses"] for endpoint in body["endpoints"]] == [["10.0.0.1"], ["10.0.0.2"]]
    assert body["ports"] == [{"name": "http", "port": 8001, "protocol": "TCP"}]
    assert body["addressType"] == "IPv4"
    assert body["metadata"]["ownerReferences"][0]["uid"] == "uid-1"


def test_a_slice_has_one_family_and_one_port() -> None:
    body: Any = route(("fd00::1", 8001), ("10.0.0.1", 8001), ("10.0.0.2", 9001)).body
    assert [endpoint["addresses"] for endpoint in body["endpoints"]] == [["10.0.0.1"]]
    assert route(("fd00::1", 8001)).body["addressType"] == "IPv6"


def test_a_slice_has_at_most_a_hundred_addresses() -> None:
    body: Any = route(*((f"10.0.1.{number}", 8001) for number in range(150))).body
    assert len(body["endpoints"]) == 100


def test_the_digest_follows_the_addresses() -> None:
    first = route(("10.0.0.1", 8001))
    assert first.digest == route(("10.0.0.1", 8001)).digest != route(("10.0.0.2", 8001)).digest
