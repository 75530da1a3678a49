"""Which LLMAdapters the replicas of an LLMDeployment are to serve, and what pods get for it."""

from collections.abc import Sequence
from typing import Any

import pytest
from rendering import child, rendered, volumes
from specs import llmdeployment, valid_spec

from quire_common.contract.adapters_file import ADAPTERS_KEY, Placement, parse_adapters
from quire_common.served_names import Claim, NameScope
from quire_operator.deployment.manifests import Manifests
from quire_operator.kube.objects import Key, Resource
from quire_operator.kube.trimming import trim_adapter, trim_resource
from quire_operator.lora.placement import ADAPTERS_FILE, Listing, Refusal, deployment_key, listings

NOW = 1_800_000_000.0
ROOM = {"adapters": {"maxRank": 8, "maxLoaded": 2}}
Found = dict[str, Listing]


def adapter(
    name: str, *, created: str = "2026-01-02T00:00:00Z", uid: str = "", annotations: Any = None, **spec: Any
) -> Resource:
    metadata = {
        "name": name,
        "namespace": "prod",
        "uid": uid or f"uid-{name}",
        "resourceVersion": "1",
        "generation": 1,
        "creationTimestamp": created,
        "annotations": annotations or {},
    }
    return trim_adapter(
        {"metadata": metadata, "spec": {"deploymentRef": {"name": "chat"}, "source": "s3://adapters/a"} | spec}
    )


def deployment(**engine: Any) -> Resource:
    return trim_resource(llmdeployment({"uid": "u", "resourceVersion": "1", "generation": 1}, engine=engine))


def decided(
    *adapters: Resource,
    to: Resource | None = None,
    claims: Sequence[Claim] = (),
    scope: NameScope | None = NameScope.CLUSTER,
) -> Found:
    def held(name: str) -> Sequence[Claim]:
        return [claim for claim in claims if claim.name == name]

    found = listings(adapters, deployment(**ROOM) if to is None else to, held, scope=scope, now=NOW)
    return {each.resource.key.name: each for each in found}


def test_an_adapter_is_listed() -> None:
    (entry,) = [each.entry for each in decided(adapter("a", placement="OnDemand")).values()]
    assert entry is not None
    assert (entry.name, entry.source, entry.placement) == ("a", "s3://adapters/a", Placement.ON_DEMAND)


@pytest.mark.parametrize(
    ("source", "listed"),
    [("file:///opt/a", "file:///opt/a"), ("file://./a/b", "/models/a/b"), ("hf://org/a@v1", "hf://org/a@v1")],
)
def test_sources_are_rendered_as_the_engine_reads_them(source: str, listed: str) -> None:
    entry = decided(adapter("a", source=source))["a"].entry
    assert entry is not None
    assert entry.source == listed


@pytest.mark.parametrize(
    ("changed", "is_new"),
    [
        ({"source": "s3://adapters/b"}, True),
        ({"uid": "another"}, True),
        ({"annotations": {"quire.dev/refresh-model": "1"}}, True),
        ({"placement": "OnDemand"}, False),
        ({"servedName": "other"}, False),
    ],
)
def test_changes_that_reload_an_adapter(changed: dict[str, Any], is_new: bool) -> None:
    before, after = decided(adapter("a"))["a"].entry, decided(adapter("a", **changed))["a"].entry
    assert before is not None and after is not None
    assert (before.generation != after.generation) is is_new
    assert 0 <= after.generation < 2**53


@pytest.mark.parametrize(
    ("resource", "to", "refusal"),
    [
        (adapter("a", source="nowhere"), None, Refusal.INVALID_SPEC),
        (adapter("a", source="file://../a"), None, Refusal.INVALID_SPEC),
        (adapter("a"), deployment(), Refusal.ADAPTERS_DISABLED),
        (adapter("a"), deployment(maxSequences="many"), Refusal.DEPLOYMENT_INVALID),
        (adapter("a", servedName="chat"), None, Refusal.NAME_TAKEN),
    ],
)
def test_reasons_of_refusals(resource: Resource, to: Resource | None, refusal: Refusal) -> None:
    found = decided(resource, to=to)["a"]
    assert (found.refusal, found.entry) == (refusal, None)


def test_adapter_of_an_unknown_deployment_is_refused() -> None:
    (found,) = listings([adapter("a")], None, lambda name: (), scope=None, now=NOW)
    assert found.refusal is Refusal.DEPLOYMENT_NOT_FOUND


def test_older_of_two_adapters_with_one_name_is_served() -> None:
    old, new = adapter("z", servedName="x"), adapter("a", servedName="x", created="2026-01-03T00:00:00Z")
    found = decided(new, old)
    assert found["z"].refusal is None
    assert (found["a"].refusal, found["a"].entry) == (Refusal.NAME_TAKEN, None)
    assert "LLMAdapter prod/z" in found["a"].message


def test_a_name_of_another_deployment_keeps_the_service() -> None:
    """Gateways route the name elsewhere, but the Service of the LLMDeployment still serves it."""
    rival = Claim(namespace="other", deployment="talk", name="a", since="2026-01-01T00:00:00Z")
    found = decided(adapter("a"), claims=[rival])["a"]
    assert found.refusal is Refusal.NAME_TAKEN
    assert found.entry is not None
    assert decided(adapter("a"), claims=[rival], scope=NameScope.NAMESPACED)["a"].refusal is None
    assert decided(adapter("a"), claims=[rival], scope=None)["a"].refusal is None


def test_namespaced_names_are_the_names_in_requests() -> None:
    entry = decided(adapter("a"), scope=NameScope.NAMESPACED)["a"].entry
    assert entry is not None
    assert entry.name == "prod/a"


def test_adapter_and_deployment_may_not_share_a_name() -> None:
    mine = Claim(namespace="prod", deployment="chat", name="b", since="2026-01-01T00:00:00Z")
    found = decided(adapter("chat", servedName="b"), claims=[mine])["chat"]
    assert found.refusal is Refusal.NAME_TAKEN


def test_deleting_adapters_are_not_listed() -> None:
    body = {"metadata": {"name": "a", "namespace": "prod", "deletionTimestamp": "x"}, "spec": {}}
    assert decided(trim_adapter(body)) == {}


def test_key_of_the_deployment_is_read_from_any_spec() -> None:
    assert deployment_key(adapter("a", source=3)) == Key("prod", "chat")
    assert deployment_key(adapter("a", deploymentRef=[])) == Key("prod", "")


def children(**engine: Any) -> Manifests:
    entries = [each.entry for each in decided(adapter("a")).values() if each.entry is not None]
    return rendered(valid_spec(engine=engine), adapters=entries)


def test_pods_mount_the_list_and_engines_read_it() -> None:
    made = children(**ROOM)
    found: Any = child(made, "ConfigMap").body
    entries, problems = parse_adapters(found["data"][ADAPTERS_KEY])
    assert ([entry.name for entry in entries], problems) == (["a"], [])
    pod: Any = made.workload.body["spec"]
    engine = pod["template"]["spec"]["containers"][0]
    volume = volumes(pod["template"]["spec"])["adapters"]
    assert volume["configMap"]["name"] == found["metadata"]["name"] == "chat-adapters"
    folder = next(each["mountPath"] for each in engine["volumeMounts"] if each["name"] == "adapters")
    assert f"{folder}/{ADAPTERS_KEY}" == ADAPTERS_FILE
    args = " ".join(engine["args"])
    assert f"--enable-lora --max-lora-rank 8 --max-loras 2 --adapters-file {ADAPTERS_FILE}" in args


def test_adapters_change_no_pod_template() -> None:
    assert rendered(valid_spec(engine=ROOM)).template_digest == children(**ROOM).template_digest


def test_no_adapter_list_without_adapter_slots() -> None:
    made = children()
    assert child(made, "ConfigMap") is None
    assert "lora" not in str(made.workload.body)


def test_credentials_are_optional_variables_of_the_engine() -> None:
    pod: Any = children(adapters={"credentials": {"secretName": "keys"}}).workload.body["spec"]
    variables = [each for each in pod["template"]["spec"]["containers"][0]["env"] if "valueFrom" in each]
    assert {each["name"] for each in variables} >= {"HF_TOKEN", "AWS_ACCESS_KEY_ID"}
    assert all(each["valueFrom"]["secretKeyRef"]["optional"] for each in variables)
