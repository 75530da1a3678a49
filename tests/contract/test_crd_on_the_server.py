"""LLMDeployments on a real API server: defaults, rejections, and permissions to change replicas.

The parser rejects what the schema rejects, because ``quire up`` has no API server.
"""

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import specs
import yaml
from refused_specs import REFUSED, Refusal

from quire_cluster.client import Response
from quire_cluster.control_plane import ControlPlane
from quire_cluster.errors import KubectlFailed
from quire_cluster.waiting import eventually
from quire_operator.api import AdapterSpec, Invalid, KVCache, Spec
from quire_operator.kube.trimming import trim_resource

GROUP = "/apis/quire.dev/v1alpha1"
CRD = Path(__file__).parents[2] / "crds" / "llmdeployments.yaml"
OWNED = "the autoscaler owns the number of replicas while spec.autoscaling is set"


def llmdeployment(name: str = "chat", **spec: Any) -> dict[str, Any]:
    body = specs.llmdeployment(**({"model": {"source": "file:///models/demo"}} | spec))
    return body | {"metadata": {"name": name}}


def autoscaling(**more: Any) -> dict[str, Any]:
    return {"autoscaling": {"maxReplicas": 3} | more}


HALF = {"type": "Percent", "value": 50, "periodSeconds": 60}


def create(server: ControlPlane, namespace: str, body: dict[str, Any]) -> Response:
    return server.client().post(f"{GROUP}/namespaces/{namespace}/llmdeployments?fieldValidation=Strict", body)


def try_out(server: ControlPlane, body: dict[str, Any]) -> Response:
    """Send a dry run, which does everything except storing the object."""
    options = "?fieldValidation=Strict&dryRun=All"
    return server.client().post(f"{GROUP}/namespaces/default/llmdeployments{options}", body)


def causes(refused: Response) -> dict[str, str]:
    """Return the messages by field, as the server reports them to clients."""
    assert refused.status == 422, refused.body
    told: dict[str, str] = {}
    for cause in refused.body["details"]["causes"]:
        field = cause["field"].removeprefix(".")  # the scale subresource's own checks start with a dot
        told[field] = f"{told.get(field, '')} {cause['message']}".strip()
    return told


def test_omitted_fields_get_defaults(crd_server: ControlPlane, namespace: str) -> None:
    created = create(crd_server, namespace, llmdeployment(autoscaling={"maxReplicas": 3}))
    assert created.body["spec"] == {
        "model": {"source": "file:///models/demo"},
        "engine": {
            "dtype": "Auto",
            "maxBatchedTokens": 2048,
            "maxSequences": 256,
            "blockSize": 16,
            "prefixCaching": "Enabled",
            "schedulingPolicy": "FCFS",
            "preemption": "Auto",
            "resumable": "Disabled",
        },
        "resources": {},
        "replicas": 1,
        "autoscaling": {
            "mode": "Enforce",
            "minReplicas": 1,
            "maxReplicas": 3,
            "scaleUp": {"window": "0s", "maxPercent": 100, "maxStep": 4, "period": "15s"},
            "scaleDown": {"window": "300s", "maxStep": 1, "period": "60s"},
        },
        "rollout": {"strategy": "RollingUpdate"},
        "drain": {"timeout": "120s"},
    }


@pytest.mark.parametrize("stored", [{}, {"engine": {"kvCache": {"memoryPercent": 90}}}], ids=["new", "of older CRDs"])
def test_the_cache_size_of_an_existing_object_can_be_set(
    crd_server: ControlPlane, namespace: str, stored: dict[str, Any]
) -> None:
    assert create(crd_server, namespace, llmdeployment(**stored)).status == 201
    patch = {"spec": {"engine": {"kvCache": {"size": "4Gi"}}}}
    path = f"{GROUP}/namespaces/{namespace}/llmdeployments/chat"
    patched = crd_server.client().request("PATCH", path, patch, content_type="application/merge-patch+json")
    assert patched.status == 200, patched.body
    parsed = Spec.parse(patched.body)
    assert isinstance(parsed, Spec)
    assert parsed.engine.kv_cache == KVCache(size_bytes=4 << 30)


ACCEPTED: dict[str, dict[str, Any]] = {
    "a hub": {"model": {"source": "hf://meta-llama/Llama-3.1-8B-Instruct@main", "credentials": {"secretName": "hf"}}},
    "a hub's old name": {"model": {"source": "hf://gpt2"}},
    "a claim": {"model": {"source": "pvc://models/llama", "servedName": "org/chat:v1"}},
    "a folder next to the file": {"model": {"source": "file://./demo"}},
    "a folder above the file": {"model": {"source": "file://../models/demo"}},
    "a bucket": {"model": {"source": "s3://bucket/team/llama", "credentials": {"secretName": "aws"}}},
    "a bucket of another store": {"model": {"source": "s3://bucket?endpoint=http://minio:9000&region=here"}},
    "an image": {"model": {"source": "oci://registry.example/llama:1"}},
    "a folder of an image": {"model": {"source": "oci://localhost:5000/org/llama:v1.0/models/llama"}},
    "an image by its digest": {"model": {"source": f"oci://registry.example/llama@sha256:{'0' * 64}"}},
    "an image by both": {"model": {"source": f"oci://registry.example/llama:1@sha256:{'0' * 64}/m"}},
    "a claim that is there": {"model": {"source": "hf://a/b", "cache": {"claimName": "models"}}},
    "a claim to make": {"model": {"source": "hf://a/b", "cache": {"size": "50Gi", "storageClassName": "fast"}}},
    "a claim for many nodes": {
        "model": {"source": "hf://a/b", "cache": {"size": "1Gi", "accessMode": "ReadWriteMany"}}
    },
    "a cache of so many bytes": {"engine": {"kvCache": {"size": 4294967296}}},
    "resources": {"resources": {"limits": {"nvidia.com/gpu": 1, "memory": "64Gi"}, "requests": {"cpu": "500m"}}},
    "several GPUs": {"resources": {"limits": {"nvidia.com/gpu": 4}}, "parallelism": {"tensor": 4}},
    "ranks": {"parallelism": {"tensor": 2}, "resources": {"limits": {"cpu": 2, "memory": "64Gi"}}},
    "ranks of as many CPUs as the node has": {"parallelism": {"tensor": 64}},
    "ranks on several nodes": {"parallelism": {"tensor": 2, "pipeline": 4, "nodes": 4}},
    "one rank on less than a CPU": {"resources": {"limits": {"cpu": "500m"}}},
    "durations": {"drain": {"timeout": "1h"}, "autoscaling": {"maxReplicas": 2, "scaleDown": {"window": "1h30m0.5s"}}},
    "no spare GPU": {"rollout": {"maxSurge": 0, "maxUnavailable": 1}},
    "a surge in percent": {"rollout": {"maxSurge": "25%", "maxUnavailable": "10%"}},
    "a schedule": autoscaling(
        schedules=[{"cron": "0 8 * * 1-5", "timeZone": "Europe/Berlin", "duration": "168h", "minReplicas": 2}]
    ),
    "the behavior of an HPA": autoscaling(
        behavior={
            "scaleUp": {"stabilizationWindowSeconds": 0, "policies": [HALF], "selectPolicy": "Min"},
            "scaleDown": {"selectPolicy": "Disabled"},
        }
    ),
    "all at once": {"rollout": {"strategy": "Recreate"}},
    "zero replicas": {"replicas": 0},
    "a pod template": {"podTemplate": {"spec": {"nodeSelector": {"gpu": "h100"}, "priorityClassName": "high"}}},
}


@pytest.mark.parametrize("spec", ACCEPTED.values(), ids=ACCEPTED.keys())
def test_valid_specs_are_accepted(crd_server: ControlPlane, spec: dict[str, Any]) -> None:
    accepted = try_out(crd_server, llmdeployment(**spec))
    assert accepted.status == 201, accepted.body


EXAMPLES = sorted((Path(__file__).parents[2] / "examples").glob("*.yaml"))


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda example: example.name)
def test_the_examples_are_accepted(crd_server: ControlPlane, example: Path) -> None:
    """The server and the parser of this version accept them."""
    told = crd_server.kubectl("apply", "--dry-run=server", "--validate=strict", "-f", str(example))
    documents = list(yaml.safe_load_all(example.read_text()))
    assert told.count("created (server dry run)") == len(documents)
    for document in documents:
        kind = AdapterSpec if document["kind"] == "LLMAdapter" else Spec
        assert isinstance(kind.parse(document), kind)


@pytest.mark.parametrize("refusal", REFUSED)
def test_invalid_fields_are_refused_by_name(crd_server: ControlPlane, refusal: Refusal) -> None:
    told, field = causes(try_out(crd_server, llmdeployment(**refusal.spec))), f"spec.{refusal.field}"
    assert (refusal.server_says or refusal.says) in told.get(field, ""), told
    assert set(told) <= {field, "<nil>"}  # <nil>: "some validation rules were not checked"


def test_all_problems_are_reported_at_once(crd_server: ControlPlane) -> None:
    wrong = llmdeployment(engine={"blockSize": 17, "dtype": "half", "maxSequences": 0}, replicas=-1)
    told = causes(try_out(crd_server, wrong))
    assert {"spec.engine.blockSize", "spec.engine.dtype", "spec.engine.maxSequences", "spec.replicas"} <= set(told)
    broken_rules = llmdeployment(
        drain={"timeout": "2"}, rollout={"maxSurge": 0}, model={"source": "hf://a/b", "servedName": "a b"}
    )
    told = causes(try_out(crd_server, broken_rules))
    assert set(told) == {"spec.drain.timeout", "spec.rollout.maxUnavailable", "spec.model.servedName"}


@pytest.mark.parametrize("name", ["9lives", "chat.v1", "c" * 55])
def test_a_name_that_no_service_could_have_is_refused(crd_server: ControlPlane, name: str) -> None:
    told = causes(try_out(crd_server, llmdeployment(name)))
    assert "must be a DNS label of at most 54 characters" in " ".join(told.values())
    assert isinstance(Spec.parse(llmdeployment(name)), Invalid)


@pytest.mark.parametrize("name", ["c" * 54, "c", "a-1"])
def test_a_name_that_fits_is_accepted(crd_server: ControlPlane, name: str) -> None:
    assert try_out(crd_server, llmdeployment(name)).status == 201
    assert isinstance(Spec.parse(llmdeployment(name)), Spec)


def test_an_object_without_a_spec_is_refused(crd_server: ControlPlane) -> None:
    body = llmdeployment()
    del body["spec"]
    assert causes(try_out(crd_server, body))["spec"] == "Required value"


def test_a_misspelt_field_is_refused_by_kubectl(crd_server: ControlPlane, namespace: str) -> None:
    body = llmdeployment(engine={"maxSequence": 4})
    with pytest.raises(KubectlFailed, match=r'unknown field "spec\.engine\.maxSequence"'):
        crd_server.kubectl("apply", "-n", namespace, "-f", "-", stdin=json.dumps(body))


class Stored:
    """An LLMDeployment on the server, changed as users change it."""

    def __init__(self, server: ControlPlane, namespace: str, **spec: Any) -> None:
        self._server, self._namespace = server, namespace
        created = create(server, namespace, llmdeployment(**spec))
        assert created.ok, created.body

    def apply(self, **spec: Any) -> None:
        """Apply as GitOps tools do."""
        arguments = ("apply", "--server-side", "--force-conflicts", "--field-manager=gitops", "-n", self._namespace)
        self._server.kubectl(*arguments, "-f", "-", stdin=json.dumps(llmdeployment(**spec)))

    def scale(self, replicas: int) -> None:
        self._server.kubectl("scale", "llmd/chat", f"--replicas={replicas}", "-n", self._namespace)

    def edit(self, patch: dict[str, Any], subresource: str = "") -> dict[str, Any]:
        path = f"{GROUP}/namespaces/{self._namespace}/llmdeployments/chat{subresource}"
        changed = self._server.client().request("PATCH", path, patch, content_type="application/merge-patch+json")
        assert changed.ok, changed.body
        body: dict[str, Any] = changed.body
        return body

    def get(self, subresource: str = "") -> dict[str, Any]:
        path = f"{GROUP}/namespaces/{self._namespace}/llmdeployments/chat{subresource}"
        body: dict[str, Any] = self._server.client().get(path).body
        return body

    @property
    def replicas(self) -> int:
        replicas: int = self.get()["spec"]["replicas"]
        return replicas


BOUNDS: dict[str, Any] = {"autoscaling": {"minReplicas": 2, "maxReplicas": 8}}


def test_users_may_not_change_replicas_with_autoscaling(crd_server: ControlPlane, namespace: str) -> None:
    stored = Stored(crd_server, namespace, replicas=6, **BOUNDS)
    with pytest.raises(KubectlFailed, match=OWNED):
        stored.scale(7)
    with pytest.raises(KubectlFailed, match=OWNED):
        stored.apply(replicas=7, **BOUNDS)
    stored.apply(replicas=6, **BOUNDS)
    stored.edit({"spec": {"autoscaling": {"maxReplicas": 9}}})
    assert stored.replicas == 6


def test_replicas_may_change_with_the_switch_to_autoscaling(crd_server: ControlPlane, namespace: str) -> None:
    stored = Stored(crd_server, namespace, replicas=6)
    stored.apply(replicas=4, **BOUNDS)
    assert stored.replicas == 4


def test_switching_back_without_replicas_keeps_the_number(crd_server: ControlPlane, namespace: str) -> None:
    stored = Stored(crd_server, namespace, replicas=6)
    stored.apply(replicas=6, **BOUNDS)
    stored.apply(replicas=6)
    assert stored.replicas == 6
    assert "autoscaling" not in stored.get()["spec"]


STATUS: dict[str, Any] = {
    "observedGeneration": 1,
    "replicas": 2,
    "readyReplicas": 1,
    "desiredReplicas": 3,
    "selector": "quire.dev/llmdeployment=chat",
    "currentRevision": "7d9f",
    "endpoint": "http://chat.default.svc:8000/v1",
    "conditions": [
        {
            "type": "Ready",
            "status": "True",
            "reason": "ReplicasReady",
            "message": "1 of 2 replicas answers",
            "lastTransitionTime": "2026-01-01T00:00:00Z",
            "observedGeneration": 1,
        }
    ],
    "capacity": {
        "kvBlocks": 4096,
        "kvTokens": 65536,
        "prefillTokensPerSecond": 9000,
        "stepMicroseconds": 7400,
        "decodeNanosecondsPerToken": 31000,
        "meanPromptTokens": 800,
        "meanOutputTokens": 120,
        "learntTime": "2026-01-01T00:00:00Z",
        "startUpSeconds": 95,
    },
    "autoscaling": {
        "desiredReplicas": 3,
        "lastDecision": {
            "time": "2026-01-01T00:00:00Z",
            "from": 2,
            "to": 3,
            "reason": "ArrivingWork",
            "message": "arrivals need 2.4 replicas",
            "inputs": {"need": "2.4"},
        },
        "history": [{"time": "2026-01-01T00:00:00Z", "from": 2, "to": 3, "reason": "ArrivingWork"}],
    },
}


def test_status_is_kept_whole_and_apart_from_the_spec(crd_server: ControlPlane, namespace: str) -> None:
    stored = Stored(crd_server, namespace)
    written = stored.edit({"status": STATUS, "spec": {"replicas": 9}}, "/status")
    assert written["status"] == STATUS
    assert written["spec"]["replicas"] == 1
    assert stored.edit({"status": {"replicas": 9}, "spec": {"replicas": 2}})["status"] == STATUS


def test_kubectl_get_prints_the_columns(crd_server: ControlPlane, namespace: str) -> None:
    stored = Stored(crd_server, namespace)
    stored.edit({"status": copy.deepcopy(STATUS)}, "/status")
    # The category is discovered a moment after the kind.
    assert eventually(lambda: "llmdeployments" in crd_server.kubectl("api-resources", "--categories=quire"))
    header, row = crd_server.kubectl("get", "quire", "-n", namespace).splitlines()
    assert header.split() == ["NAME", "READY", "STATUS", "REPLICAS", "DESIRED", "MODEL", "AGE"]
    assert row.split()[:6] == ["llmdeployment.quire.dev/chat", "True", "ReplicasReady", "2", "3", "file:///models/demo"]
    wide = crd_server.kubectl("get", "llmd", "-n", namespace, "-o", "wide")
    assert "http://chat.default.svc:8000/v1" in wide


def test_served_schema_equals_the_file(crd_server: ControlPlane) -> None:
    """The server knows every field of the file; it would drop unknown ones."""
    assert crd_server.kubectl("diff", "--server-side", "-f", str(CRD)) == ""


def test_a_removed_field_of_a_stored_object_blocks_no_change(crd_server: ControlPlane, namespace: str) -> None:
    """The API server keeps fields and words for the operator to report, and refuses them in new objects only."""
    kind = "/apis/apiextensions.k8s.io/v1/customresourcedefinitions/llmdeployments.quire.dev"
    schema = "/spec/versions/0/schema/openAPIV3Schema/properties/spec/properties"
    removed = ("rollout/properties/windows", "engine/properties/speculation/properties/method")
    of_before = [{"op": "remove", "path": f"{schema}/{path}/x-kubernetes-validations"} for path in removed]
    eagle = {"engine": {"speculation": {"method": "Eagle", "draft": {"source": "hf://a/b"}}}}
    old = {"rollout": {"windows": [{"cron": "0 2 * * *", "duration": "2h"}]}, **eagle}
    patched = crd_server.client().request("PATCH", kind, of_before, content_type="application/json-patch+json")
    assert patched.status == 200, patched.body
    try:
        assert eventually(lambda: create(crd_server, namespace, llmdeployment(**old)).status == 201)
    finally:
        crd_server.kubectl("apply", "--server-side", "--force-conflicts", "-f", str(CRD))
    assert eventually(lambda: try_out(crd_server, llmdeployment(**eagle)).status == 422)

    path = f"{GROUP}/namespaces/{namespace}/llmdeployments/chat"
    for where, change in (("/status", {"status": {"replicas": 1}}), ("", {"spec": {"rollout": {"maxSurge": 2}}})):
        changed = crd_server.client().request(
            "PATCH", path + where, change, content_type="application/merge-patch+json"
        )
        assert changed.status == 200, changed.body
    assert changed.body["status"]["replicas"] == 1
    resource = trim_resource(changed.body)
    assert [problem.path for problem in resource.removed] == ["spec.rollout.windows"]
    invalid = Spec.parse(resource.body)
    assert isinstance(invalid, Invalid)
    assert [problem.path for problem in invalid.problems] == ["spec.engine.speculation.method"]
    changed = crd_server.client().request(
        "PATCH", path, {"spec": {"engine": {"speculation": None}}}, content_type="application/merge-patch+json"
    )
    parsed = Spec.parse(trim_resource(changed.body).body)
    assert isinstance(parsed, Spec) and parsed.rollout.max_surge == 2


def test_one_pod_never_becomes_a_group(crd_server: ControlPlane, namespace: str) -> None:
    """Not in either direction; the number of pods of a group may change."""
    stored = Stored(crd_server, namespace)
    with pytest.raises(KubectlFailed, match="cannot change between 1 and more"):
        stored.apply(parallelism={"tensor": 4, "nodes": 2})
    crd_server.kubectl("delete", "llmd", "chat", "-n", namespace)
    stored = Stored(crd_server, namespace, parallelism={"tensor": 4, "nodes": 2})
    stored.apply(parallelism={"tensor": 4, "nodes": 4})
    with pytest.raises(KubectlFailed, match="cannot change between 1 and more"):
        stored.apply(parallelism={"tensor": 4})
