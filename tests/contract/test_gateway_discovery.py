"""The gateway finds the objects of the operator, and the autoscaler reads the gateway's requests."""

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest
import yaml
from aiohttp.test_utils import make_mocked_request
from hypothesis import given
from hypothesis import strategies as st
from rendering import rendered
from specs import valid_spec

from quire_common.contract.gateway import REQUESTS_PATH, Endpoint, ModelEndpoints
from quire_common.served_names import Claim, NameScope
from quire_engine import flags
from quire_gateway.app import OPEN_PATHS, Site
from quire_gateway.bodies import BodyMemory
from quire_gateway.config import FileSource, parse_config
from quire_gateway.endpoints.kubernetes_objects import KubeSlice, read_model, snapshot_of
from quire_gateway.fleet import Fleet
from quire_gateway.metrics import Metrics
from quire_operator.api import Spec, names
from quire_operator.autoscaling.observation import local_gateway_args, read_requests
from quire_operator.deployment import engine_contract
from quire_operator.deployment.served_names import served_names
from quire_operator.deployment.store import ServedNameClaims, Store
from quire_operator.kube import trimming

EXAMPLE = Path(__file__).parents[2] / "examples" / "demo.yaml"


def test_replicas_are_in_the_service_that_the_operator_renders():
    spec = Spec.parse(yaml.safe_load(EXAMPLE.read_text()))
    assert isinstance(spec, Spec)
    ready = [m.body for m in rendered(spec) if m.ref.kind == "Service" and m.body["spec"].get("clusterIP") != "None"]
    assert [body["metadata"]["name"] for body in ready] == [spec.name]
    # The EndpointSlice controller copies the labels of the Service, and the gateway's watch selects by this one.
    assert names.LABEL_DEPLOYMENT in ready[0]["metadata"]["labels"]


async def test_operator_reads_the_request_counts_of_a_gateway():
    fleet = Fleet()
    endpoint = Endpoint(id="a-0", url="http://127.0.0.1:1", ready=True, serving=True, terminating=False)
    models = {"asleep": (), "busy": (endpoint,), "idle": ()}
    fleet.publish({name: ModelEndpoints(name=name, endpoints=found) for name, found in models.items()}, now=0)
    metrics = Metrics(fleet, BodyMemory(0))
    metrics.held["asleep"] = 3
    site = Site(fleet=fleet, metrics=metrics)
    with fleet.pools["busy"].backends["a-0"].request(100.0):
        answer = await site.requests(make_mocked_request("GET", REQUESTS_PATH))
    read = read_requests(answer.body)
    assert (read.held, read.in_flight, read.is_complete) == ({"asleep": 3}, {"busy": 1}, True)


def resource(
    namespace: str, name: str, served: str, since: str | None, created: str, deleting: bool, reported: bool
) -> dict[str, Any]:
    metadata = {"namespace": namespace, "name": name, "uid": f"{namespace}/{name}", "creationTimestamp": created}
    if deleting:
        metadata["deletionTimestamp"] = created
    status: dict[str, Any] = {"observedGeneration": 1} if reported else {}
    if since is not None:
        status["servedName"] = {"name": served, "since": since}
    spec = {"model": {"source": "file:///m", "servedName": served}}
    return {"apiVersion": names.API_VERSION, "kind": names.KIND, "metadata": metadata, "spec": spec, "status": status}


TIMES = st.sampled_from(["2026-01-01T00:00:00Z", "2026-01-01T00:00:01Z", "2026-02-01T00:00:00Z"])
RESOURCES = st.lists(
    st.builds(
        resource,
        st.sampled_from(["prod", "team", "a"]),
        st.sampled_from(["chat", "talk"]),
        st.sampled_from(["m", "n"]),
        st.none() | TIMES,
        TIMES,
        st.booleans(),
        st.booleans(),
    ),
    unique_by=lambda body: (body["metadata"]["namespace"], body["metadata"]["name"]),
    max_size=6,
)


@given(RESOURCES, st.sampled_from(NameScope))
def test_operator_and_gateway_agree_on_name_owners(bodies: list[dict[str, Any]], scope: NameScope) -> None:
    """The operator reports no conflict for exactly those LLMDeployments to which the gateway sends requests."""
    store, models, slices = Store(), [], []
    for body in bodies:
        trimmed = trimming.trim_resource(body)
        store.put_resource(trimmed)
        models.append(read_model(json.dumps(body).encode()))
        endpoints = {
            "metadata": {
                "namespace": trimmed.key.namespace,
                "labels": {"kubernetes.io/service-name": trimmed.key.name},
            },
            "addressType": "IPv4",
            "ports": [{"name": "http", "port": 8000}],
            "endpoints": [{"addresses": ["10.0.0.1"], "targetRef": {"name": trimmed.key.name}}],
        }
        slices.append(msgspec.convert(endpoints, KubeSlice))
    claims = ServedNameClaims(store, lambda key: None, lambda: scope)
    expected = {str(key): name for key in store.all_keys() if (name := claims.requested_name(key)) is not None}
    found = snapshot_of([model for model in models if model is not None], slices, scope)
    assert expected == {endpoint.id: model for model, each in found.items() for endpoint in each.endpoints}


@pytest.mark.parametrize("scope", list(NameScope))
def test_engine_accepts_the_name_that_clients_of_the_gateway_use(scope: NameScope) -> None:
    spec = valid_spec(namespace="team-a")
    served = served_names(spec, scope)
    args = engine_contract.engine_args(spec, model_path="m", served_names=served)
    config = flags.parse(args, {})
    claim = Claim(namespace="team-a", deployment="chat", name="chat", since="")
    assert claim.requested_as(scope) in config.server.served_model_names
    assert config.server.served_model_names[0] == "chat", "answers and metrics keep the plain name"


def test_gateway_route_polled_by_the_operator_needs_no_key():
    assert REQUESTS_PATH in OPEN_PATHS


def test_gateway_parses_the_local_mode_command_line():
    args = local_gateway_args(host="127.0.0.1", port=8000, endpoints_file="/e.json", drain_timeout_seconds=30.0)
    config = parse_config(args, {})
    assert (config.host, config.port, config.drain_timeout_seconds) == ("127.0.0.1", 8000, 30.0)
    assert config.source == FileSource(path=Path("/e.json"))
