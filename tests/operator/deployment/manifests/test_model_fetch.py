"""The model of a pod: what is fetched before the engine starts, with which credentials, and what is mounted."""

from typing import Any

import pytest
from rendering import mounts, volumes, workload
from specs import valid_spec

from quire_operator.deployment.pod_template import Images

DIGEST = f"sha256:{'a' * 64}"
KEYS = ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN", "AWS_REGION", "AWS_ENDPOINT_URL")


def deployment(model: dict[str, Any], **spec: Any) -> Any:
    images = Images(engine="engine:1", hub_endpoint="http://hub")
    return workload(valid_spec(model=model, **spec), images=images)


def pod(model: dict[str, Any], **more: Any) -> Any:
    return deployment(model, **more)["template"]["spec"]


@pytest.mark.parametrize(
    ("source", "path"),
    [
        ("s3://bucket", "/models/s3--bucket@latest"),
        ("s3://bucket/team/llama", "/models/s3--bucket--team--llama@latest"),
    ],
)
def test_remote_model_is_fetched_to_the_folder_of_the_engine(source: str, path: str) -> None:
    made = pod({"source": source, "cache": {"claimName": "models"}})
    (fetch,), (engine,) = made["initContainers"], made["containers"]
    assert (fetch["name"], fetch["image"], fetch["command"]) == ("fetch-model", "engine:1", ["quire-fetch"])
    assert fetch["args"][:2] == [source, "--to"]
    assert fetch["args"][3:] == ["--termination-log", "/dev/termination-log", "--progress-port", "8000"]
    assert engine["args"][:2] == ["--model", fetch["args"][2]] and fetch["args"][2].startswith(path)
    assert volumes(made)["models"] == {"persistentVolumeClaim": {"claimName": "models"}}
    assert mounts(fetch) == dict.fromkeys(("/models", "/tmp", "/cache"), False)
    assert mounts(engine)["/models"] is True
    assert "HF_ENDPOINT" not in {entry["name"] for entry in fetch["env"]}, "that is of hubs"


def test_models_that_could_share_a_folder_name_do_not() -> None:
    sources = ["s3://bucket/a/b", "s3://bucket/a--b", "s3://bucket/a/b?endpoint=http://minio:9000", "s3://bucket/a b"]
    paths = {pod({"source": source})["containers"][0]["args"][1] for source in sources}
    assert len(paths) == len(sources)
    assert all(path.removeprefix("/models/").replace("@latest", "").isascii() and " " not in path for path in paths)


def test_pod_does_not_start_without_bucket_credentials() -> None:
    (fetch,) = pod({"source": "s3://bucket/m", "credentials": {"secretName": "aws"}})["initContainers"]
    env = {entry["name"]: entry for entry in fetch["env"]}
    references = {key: env[key]["valueFrom"]["secretKeyRef"] for key in KEYS}
    assert all((reference["name"], reference["key"]) == ("aws", key) for key, reference in references.items())
    assert [references[key].get("optional", False) for key in KEYS] == [False, False, True, True, True]


def test_pod_identity_is_used_without_a_secret() -> None:
    (fetch,) = pod({"source": "s3://bucket/m"})["initContainers"]
    assert not [entry for entry in fetch["env"] if "valueFrom" in entry or entry["name"].startswith("AWS_")]


@pytest.mark.parametrize(
    ("source", "reference", "path"),
    [
        ("oci://reg.example/m:1", "reg.example/m:1", "/models"),
        (f"oci://reg.example/m:1@{DIGEST}/a/b", f"reg.example/m:1@{DIGEST}", "/models/a/b"),
    ],
)
def test_image_volumes_let_the_kubelet_provide_the_model(source: str, reference: str, path: str) -> None:
    model = {"source": source, "credentials": {"secretName": "pull"}}
    made = pod(model, engine={"imagePullSecrets": [{"name": "engine"}, {"name": "pull"}]})
    assert "initContainers" not in made
    assert volumes(made)["models"] == {"image": {"reference": reference}}
    assert made["containers"][0]["args"][:2] == ["--model", path]
    assert made["imagePullSecrets"] == [{"name": "engine"}, {"name": "pull"}]


def test_remote_models_extend_the_progress_deadline() -> None:
    seconds = {
        source: deployment({"source": source})["progressDeadlineSeconds"]
        for source in ("file:///m", "pvc://c", "hf://a/b", "s3://bucket/m", "oci://reg.example/m:1")
    }
    assert seconds["file:///m"] == seconds["pvc://c"]
    assert seconds["hf://a/b"] == seconds["s3://bucket/m"] == seconds["oci://reg.example/m:1"] > seconds["pvc://c"]
