"""The gateway finds what the operator makes, and the autoscaler reads what the gateway says."""

from pathlib import Path
from typing import Any

import msgspec
import yaml
from aiohttp.test_utils import make_mocked_request
from hypothesis import given
from hypothesis import strategies as st

from quire_common.contract.gateway import REQUESTS_PATH, Endpoint, ModelEndpoints
from quire_gateway.app import OPEN_PATHS, Site
from quire_gateway.bodies import BodyMemory
from quire_gateway.config import FileSource, parse_config
from quire_gateway.endpoints.kubernetes import KubeObject, ObjectKey, snapshot_of
from quire_gateway.fleet import Fleet
from quire_gateway.metrics import Metrics
from quire_operator.domain.autoscaling.gateway_contract import local_gateway_args, read_requests
from quire_operator.domain.cluster_state import observed
from quire_operator.domain.manifests import desired, served_names
from quire_operator.domain.manifests.pod_template import Images
from quire_operator.domain.resource import Invalid, Spec, names
from quire_operator.reconcile.served_name_claims import ServedNameClaims
from quire_operator.reconcile.store import Store

IMAGES = Images(engine="engine")
EXAMPLE = Path(__file__).parents[2] / "examples" / "demo.yaml"


def test_services_that_the_operator_renders_are_one_model():
    spec = Spec.parse(yaml.safe_load(EXAMPLE.read_text()))
    assert isinstance(spec, Spec)
    manifests = desired.desired(spec, target=1, uid="u", images=IMAGES)
    assert not isinstance(manifests, Invalid)
    services = [m.body for m in manifests if m.body["kind"] == "Service"]
    assert len(services) == 2
    assert all(names.LABEL_DEPLOYMENT in body["metadata"]["labels"] for body in services)

    objects = {body["metadata"]["name"]: msgspec.convert(body, KubeObject) for body in services}
    found = snapshot_of({ObjectKey(spec.namespace, name): item for name, item in objects.items()}, [])

    assert {name: model.endpoints for name, model in found.items()} == {spec.model.served_name: ()}


async def test_requests_of_a_gateway_are_read_as_they_were_meant():
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


def service(
    namespace: str, name: str, served: str, seniority: str | None, made: str, owner: dict[str, Any] | None
) -> dict[str, Any]:
    annotations = {names.ANNOTATION_SERVED_NAME: served}
    if seniority is not None:
        annotations[names.ANNOTATION_SENIORITY] = seniority
    metadata = {
        "namespace": namespace,
        "name": name,
        "creationTimestamp": made,
        "labels": {names.LABEL_DEPLOYMENT: name},
        "annotations": annotations,
    }
    if owner is not None:
        metadata["ownerReferences"] = [owner | {"name": name}]
    return {"apiVersion": "v1", "kind": "Service", "metadata": metadata}


TIMES = st.sampled_from(["2026-01-01T00:00:00Z", "2026-01-01T00:00:01Z", "2026-02-01T00:00:00Z"])
OWNERS = st.fixed_dictionaries(
    {
        "apiVersion": st.sampled_from([names.API_VERSION, "quire.dev/v9"]),
        "kind": st.sampled_from([names.KIND, "Thing"]),
        "uid": st.sampled_from(["u1", "u2", ""]),
        "controller": st.booleans(),
    }
)
SERVICES = st.lists(
    st.builds(
        service,
        st.sampled_from(["prod", "team", "a"]),
        st.sampled_from(["chat", "talk"]),
        st.sampled_from(["m", "n"]),
        st.none() | st.builds(served_names.seniority, TIMES, st.sampled_from(["u1", "u2"])),
        TIMES,
        st.none() | OWNERS,
    ),
    unique_by=lambda body: (body["metadata"]["namespace"], body["metadata"]["name"]),
    max_size=6,
)


@given(SERVICES)
def test_both_give_a_served_name_to_the_same_llmdeployment(bodies: list[dict[str, Any]]) -> None:
    """What the operator finds no conflict in, and where the gateway sends requests."""
    store, services, slices = Store(), {}, []
    for body in bodies:
        key = observed.key_of_child(body)
        assert key is not None
        store.put_child(key, observed.trim_child(body, kind="Service"))
        services[ObjectKey(key.namespace, key.name)] = msgspec.convert(body, KubeObject)
        endpoints = {
            "metadata": {"namespace": key.namespace, "labels": {"kubernetes.io/service-name": key.name}},
            "addressType": "IPv4",
            "ports": [{"name": "http", "port": 8000}],
            "endpoints": [{"addresses": ["10.0.0.1"], "targetRef": {"name": key.name}}],
        }
        slices.append(msgspec.convert(endpoints, KubeObject))
    rivals = ServedNameClaims(store, lambda key: None)
    claims = {str(key): store.claim(key) for key in store.all_keys() if rivals.conflict(key) is None}
    routed = {
        endpoint.id: model for model, found in snapshot_of(services, slices).items() for endpoint in found.endpoints
    }
    assert {key: claim and claim.served_name for key, claim in claims.items()} == routed


def test_gateway_asks_for_no_key_where_the_operator_brings_none():
    assert REQUESTS_PATH in OPEN_PATHS


def test_command_line_that_local_mode_gives_is_the_gateways():
    args = local_gateway_args(host="127.0.0.1", port=8000, endpoints_file="/e.json", drain_timeout_seconds=30.0)
    config = parse_config(args, {})
    assert (config.host, config.port, config.drain_timeout_seconds) == ("127.0.0.1", 8000, 30.0)
    assert config.source == FileSource(path=Path("/e.json"))
