"""The draft model of a pod: its download, its volume, and the engine's arguments for it."""

from collections.abc import Callable
from typing import Any

import pytest
from rendering import mounts, volumes, workload
from specs import valid_spec

from quire_operator.deployment.pod_template import Images

CLAIM = {"persistentVolumeClaim": {"claimName": "models", "readOnly": True}}


def deployment(model: dict[str, Any], draft: dict[str, Any], **more: Any) -> Any:
    speculation = {"method": "DraftModel", "draft": draft, **more}
    images = Images(engine="engine:1", hub_endpoint="http://hub")
    return workload(valid_spec(model=model, engine={"speculation": speculation}), images=images)


def pod(model: dict[str, Any], draft: dict[str, Any], **more: Any) -> Any:
    return deployment(model, draft, **more)["template"]["spec"]


def draft_path(made: Any) -> str:
    args = made["containers"][0]["args"]
    assert args[args.index("--spec-method") + 1] == "draft_model"
    return str(args[args.index("--spec-model") + 1])


@pytest.mark.parametrize(
    ("model", "draft", "path", "own_volume"),
    [
        ({"source": "hf://a/b"}, "hf://a/small", "/models/a--small@main", None),
        ({"source": "hf://a/b", "cache": {"size": "1Gi"}}, "s3://bucket/d", "/models/s3--bucket--d@latest", None),
        ({"source": "file://./m", "cache": {"claimName": "c"}}, "hf://a/s", "/models/a--s@main", None),
        ({"source": "file:///m"}, "hf://a/s", "/draft/a--s@main", {"emptyDir": {"sizeLimit": "200Gi"}}),
        ({"source": "pvc://models/m"}, "hf://a/s", "/draft/a--s@main", {"emptyDir": {"sizeLimit": "200Gi"}}),
        ({"source": "hf://a/b"}, "pvc://models/s", "/draft/s", CLAIM),
        ({"source": "pvc://models/m"}, "pvc://models/s", "/models/s", None),
        ({"source": "hf://a/b", "cache": {"claimName": "models"}}, "pvc://models/s", "/models/s", None),
        ({"source": "pvc://models/m"}, "file://./s", "/models/s", None),
        ({"source": "hf://a/b"}, "file:///opt/s", "/opt/s", None),
    ],
)
def test_engine_reads_the_draft_from_its_mount(
    model: dict[str, Any], draft: str, path: str, own_volume: dict[str, Any] | None
) -> None:
    made = pod(model, {"source": draft})
    assert draft_path(made) == path
    assert volumes(made).get("draft") == own_volume
    engine = made["containers"][0]
    assert mounts(engine).get("/draft") == (True if own_volume else None)
    fetched = [init for init in made.get("initContainers", []) if init["name"] == "fetch-draft"]
    assert len(fetched) == draft.startswith(("hf:", "s3:"))
    for init in fetched:
        assert init["args"] == [draft + ("@main" if "hf:" in draft else ""), "--to", path, "--progress-port", "8000"]
        assert mounts(init)["/draft" if own_volume else "/models"] is False
    claims = [
        volume["persistentVolumeClaim"]["claimName"]
        for volume in volumes(made).values()
        if len(volume) and "persistentVolumeClaim" in volume
    ]
    assert len(claims) == len(set(claims)), "a claim is mounted once"


def test_target_is_fetched_first_and_names_the_version() -> None:
    made = pod({"source": "hf://a/b"}, {"source": "hf://a/s"})
    target, draft = made["initContainers"]
    assert (target["name"], draft["name"]) == ("fetch-model", "fetch-draft")
    assert "--termination-log" in target["args"] and "--termination-log" not in draft["args"]


@pytest.mark.parametrize("required", [True, False])
def test_optional_draft_does_not_block_pod_start(required: bool) -> None:
    draft = {"source": "hf://a/s", "credentials": {"secretName": "hub"}}
    made = pod({"source": "hf://a/b"}, draft, required=required)
    init, args = made["initContainers"][1], made["containers"][0]["args"]
    assert ("--optional" in init["args"], "--no-spec-required" in args) == (not required, not required)
    (token,) = (entry for entry in init["env"] if entry["name"] == "HF_TOKEN")
    assert token["valueFrom"]["secretKeyRef"].get("optional", False) is not required
    assert "HF_TOKEN" not in {entry["name"] for entry in made["initContainers"][0]["env"]}


@pytest.mark.parametrize(
    "model", [{"source": "hf://a/b", "cache": {"size": "1Gi"}}, {"source": "oci://reg.example/m:1"}]
)
def test_the_kubelet_mounts_the_image_of_a_draft(model: dict[str, Any]) -> None:
    made = pod(model, {"source": "oci://reg.example/s:1/d", "credentials": {"secretName": "pull"}})
    assert "fetch-draft" not in [init["name"] for init in made.get("initContainers", [])]
    assert volumes(made)["draft"] == {"image": {"reference": "reg.example/s:1"}}
    assert draft_path(made) == "/draft/d"
    assert made["imagePullSecrets"] == [{"name": "pull"}]


def test_two_downloads_have_twice_the_time() -> None:
    deadlines = [
        deployment({"source": "hf://a/b"}, {"source": source})["progressDeadlineSeconds"]
        for source in ("file:///s", "hf://a/s")
    ]
    assert deadlines[1] - deadlines[0] == 3600


def test_a_draft_outside_of_models_is_refused_by_path(problems: Callable[..., dict[str, str]]) -> None:
    speculation = {"method": "DraftModel", "draft": {"source": "file://../s"}}
    found = problems(engine={"speculation": speculation})
    assert "is outside /models" in found["spec.engine.speculation.draft.source"]


def test_the_volume_of_the_draft_belongs_to_the_operator(problems: Callable[..., dict[str, str]]) -> None:
    speculation = {"method": "DraftModel", "draft": {"source": "pvc://c/s"}}
    volume = {"name": "draft", "persistentVolumeClaim": {"claimName": "other"}}
    found = problems(engine={"speculation": speculation}, podTemplate={"spec": {"volumes": [volume]}})
    assert any("belongs to the operator" in message for message in found.values())
