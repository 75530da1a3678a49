"""The objects of a canary have its own spec, and no selector of one track matches pods of the other."""

from typing import Any

from rendering import IMAGES, rendered
from specs import llmdeployment, valid_spec

from quire_operator.api import HubSource, Invalid, Spec
from quire_operator.canary.manifests import Revision, canary_manifests, revision_manifests
from quire_operator.kube.objects import Resource
from quire_operator.kube.trimming import trim_resource

RAW: dict[str, Any] = {"model": {"source": "file:///m"}, "replicas": 4, "rollout": {"strategy": "Canary"}}


def resource(**spec: Any) -> Resource:
    return trim_resource(llmdeployment({"uid": "u"}, **(RAW | spec)))


def parsed(**spec: Any) -> Spec:
    return valid_spec(**(RAW | spec))


def objects(spec: Spec, stable: Spec) -> dict[str, Any]:
    found = canary_manifests(spec, 2, uid="u", revision="r2", images=IMAGES, stable=rendered(stable))
    assert not isinstance(found, Invalid)
    return {f"{manifest.ref}": manifest.body for manifest in found}


def test_no_service_of_one_track_selects_pods_of_the_other() -> None:
    found = objects(parsed(engine={"maxSequences": 16}), parsed())
    assert set(found) == {"Service chat-canary", "Deployment chat-canary"}
    pod = found["Deployment chat-canary"]["spec"]["template"]["metadata"]["labels"]
    assert found["Deployment chat-canary"]["spec"]["selector"]["matchLabels"].items() <= pod.items()
    assert found["Service chat-canary"]["spec"]["selector"].items() <= pod.items()
    for manifest in rendered(parsed()):
        body: Any = manifest.body
        if manifest.ref.kind in ("Service", "Deployment"):
            selector = body["spec"]["selector"]
            assert not selector.get("matchLabels", selector).items() <= pod.items()
        elif manifest.ref.kind == "PodDisruptionBudget":
            assert pod["app.kubernetes.io/component"] in body["spec"]["selector"]["matchExpressions"][0]["values"]


def test_cache_used_only_by_the_canary_is_created_with_it() -> None:
    cache = {"source": "hf://org/m", "cache": {"size": "1Gi", "accessMode": "ReadWriteMany"}}
    assert "PersistentVolumeClaim chat-models" in objects(parsed(model=cache), parsed())
    assert "PersistentVolumeClaim chat-models" not in objects(parsed(model=cache), parsed(model=cache))


def test_revision_covers_only_fields_that_reach_the_pods() -> None:
    one = Revision(spec=RAW)
    same = Revision(spec={**RAW, "replicas": 9, "paused": True, "autoscaling": {"maxReplicas": 3}, "rollout": {}})
    assert one.name == same.name
    assert one.name != Revision(spec={**RAW, "engine": {"maxSequences": 8}}).name
    assert one.name != Revision(spec=RAW, model_revision="abc").name


def test_stored_revision_uses_the_current_replicas() -> None:
    old = Revision(spec={"model": {"source": "hf://org/m"}, "replicas": 1}, model_revision="abc")
    (manifest,) = revision_manifests(resource(), {old.name: old})
    body: Any = manifest.body
    assert manifest.ref.name == f"chat-{old.name}" and "replicas" not in body["data"]["spec"]
    again = Revision(spec=body["data"]["spec"], model_revision=body["data"]["modelRevision"]).parse(
        resource(replicas=7)
    )
    assert isinstance(again, Spec) and again.replicas == 7
    assert isinstance(again.model.source, HubSource) and again.model.source.revision == "abc"
