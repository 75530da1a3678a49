"""Defaults for the LLMDeployments of a namespace or of the cluster: reading, precedence and origins."""

from typing import Any

import pytest
from specs import valid_spec

from quire_operator.domain.resource.defaults import FIELDS, Defaults, apply_defaults, read_defaults

MODEL: dict[str, Any] = {"source": "hf://org/model"}
CLUSTER = {
    "engine": {"image": "registry.example/engine:1", "maxModelLength": 4096},
    "podTemplate": {"spec": {"nodeSelector": {"pool": "shared"}, "tolerations": [{"key": "gpu"}]}},
}
TEAM = {"engine": {"image": "registry.example/team:2"}, "podTemplate": {"spec": {"nodeSelector": {"pool": "team"}}}}


def layers(*documents: object) -> list[Defaults]:
    found = [read_defaults(document, source=f"ns-{place}/quire-defaults") for place, document in enumerate(documents)]
    assert not [layer.complaint for layer in found if layer.complaint]
    return found


def applied(spec: dict[str, Any], *documents: object) -> dict[str, Any]:
    result = apply_defaults({"model": MODEL} | spec, layers(*documents))
    return dict(result.spec)


def test_own_value_precedes_namespace_and_cluster_defaults() -> None:
    assert applied({}, TEAM, CLUSTER)["engine"] == {"image": "registry.example/team:2", "maxModelLength": 4096}
    own = applied({"engine": {"image": "registry.example/own:3"}}, TEAM, CLUSTER)
    assert own["engine"] == {"image": "registry.example/own:3", "maxModelLength": 4096}
    assert applied({}, CLUSTER)["engine"]["image"] == "registry.example/engine:1"


def test_replicas_may_be_replaced_one_by_one_by_default() -> None:
    limits = {"maxSurge": 0, "maxUnavailable": 1}
    assert applied({}, {"rollout": limits})["rollout"] == limits


def test_pod_templates_are_merged_key_by_key() -> None:
    pod = applied({"podTemplate": {"spec": {"priorityClassName": "high"}}}, TEAM, CLUSTER)["podTemplate"]["spec"]
    assert pod == {"priorityClassName": "high", "nodeSelector": {"pool": "team"}, "tolerations": [{"key": "gpu"}]}
    replaced = applied({"podTemplate": {"spec": {"tolerations": []}}}, CLUSTER)["podTemplate"]["spec"]
    assert replaced["tolerations"] == [], "lists are replaced"


def test_each_default_has_its_origin() -> None:
    found = apply_defaults({"model": MODEL, "engine": {"maxModelLength": 512}}, layers(TEAM, CLUSTER))
    assert found.origins == (
        ("engine.image", "ns-0/quire-defaults"),
        ("podTemplate", "ns-0/quire-defaults"),
        ("podTemplate", "ns-1/quire-defaults"),
    )


@pytest.mark.parametrize(
    ("spec", "defaults", "path"),
    [
        ({}, {"autoscaling": {"targets": {"queueDepth": 4}}}, "autoscaling"),
        ({"model": MODEL | {"cache": {"claimName": "x"}}}, {"model": {"cache": {"accessMode": "ReadWriteMany"}}}, ""),
        ({"rollout": {"strategy": "Recreate"}}, {"rollout": {"maxSurge": 2}}, ""),
        ({"rollout": {"maxSurge": 0, "maxUnavailable": 1}}, {"rollout": {"maxUnavailable": 0, "maxSurge": 1}}, ""),
    ],
    ids=["no autoscaling", "an existing claim", "no surge", "a surge of its own"],
)
def test_a_default_changes_no_feature_that_was_not_chosen(
    spec: dict[str, Any], defaults: dict[str, Any], path: str
) -> None:
    document = {"model": MODEL} | spec
    assert apply_defaults(document, layers(defaults)).spec == document
    assert path not in document


def test_every_field_with_a_default_leads_to_a_valid_spec() -> None:
    """A default is applied to the LLMDeployment that uses it, and the result is valid."""
    document = {
        "model": {
            "credentials": {"secretName": "hub"},
            "cache": {"storageClassName": "fast", "accessMode": "ReadWriteMany", "retain": "Retain"},
        },
        "engine": {
            "image": "registry.example/engine:1",
            "imagePullPolicy": "Always",
            "imagePullSecrets": [{"name": "pull"}],
            "maxModelLength": 4096,
            "kvCache": {"memoryPercent": 80},
        },
        "resources": {"limits": {"memory": "4Gi"}},
        "autoscaling": {
            "metricsSource": "Pods",
            "targets": {
                "queueDepth": 4,
                "kvUsagePercent": 80,
                "firstTokenWait": {"threshold": "2s"},
                "totalTimeToFirstToken": {"threshold": "4s"},
                "interTokenLatency": {"threshold": "80ms"},
            },
            "scaleToZero": {"after": "10m", "holdTimeout": "5m", "maxHeld": 10},
        },
        "rollout": {"maxSurge": 2, "maxUnavailable": 1, "progressDeadline": "10m", "windows": [WINDOW]},
        "auth": {"secretName": "keys"},
        "podTemplate": {"spec": {"nodeSelector": {"pool": "shared"}}},
    }
    (layer,) = layers(document)
    assert set(layer.values) == {each.path for each in FIELDS}, "each field is in this test"
    spec = {"model": MODEL | {"cache": {"size": "1Gi"}}, "autoscaling": {"maxReplicas": 2}}
    found = apply_defaults(spec, [layer])
    assert {name for name, _ in found.origins} == {each.text for each in FIELDS}
    assert valid_spec(**found.spec)


WINDOW = {"cron": "0 2 * * *", "duration": "4h"}


@pytest.mark.parametrize(
    ("document", "path", "part"),
    [
        ([], "data.spec", "must be a mapping"),
        ("text", "data.spec", "must be a mapping"),
        ({"replicas": 3}, "data.spec: spec.replicas", "cannot have a default"),
        ({"model": {"source": "hf://a/b"}}, "data.spec: spec.model.source", "cannot have a default"),
        ({"engine": {"dtype": "Auto"}}, "data.spec: spec.engine.dtype", "Fields that can: model.credentials"),
        ({"engine": "x"}, "data.spec: spec.engine", "cannot have a default"),
        ({"engine": {"maxModelLength": -1}}, "data.spec: spec.engine.maxModelLength", "must be"),
        ({"rollout": {"maxSurge": "x"}}, "data.spec: spec.rollout.maxSurge", "must be"),
        ({"rollout": {"maxSurge": "x", "maxUnavailable": 1}}, "data.spec: spec.rollout.maxSurge", "must be"),
        ({"rollout": {"maxSurge": 0}}, "data.spec: spec.rollout.maxUnavailable", "must be at least 1"),
        ({"podTemplate": {"spec": {"nodeSelector": {1: "a"}}}}, "data.spec: spec.podTemplate", "write it in quotes"),
        (
            {"model": {"cache": {"accessMode": "Sometimes"}}},
            "data.spec: spec.model.cache.accessMode",
            "must be ReadWriteOnce or ReadWriteMany",
        ),
        (
            {"autoscaling": {"targets": {"firstTokenWait": {"percentile": 100}}}},
            "data.spec: spec.autoscaling.targets.firstTokenWait.percentile",
            "must be",
        ),
    ],
)
def test_an_invalid_default_names_its_path_and_the_remedy(document: object, path: str, part: str) -> None:
    found = read_defaults(document, source="ns/quire-defaults")
    assert [problem.path for problem in found.problems] == [path]
    assert part in found.problems[0].message
    assert found.complaint.startswith("ConfigMap ns/quire-defaults: data.spec")


def test_the_valid_defaults_next_to_an_invalid_one_apply() -> None:
    found = read_defaults({"replicas": 3, "engine": {"maxModelLength": 512}}, source="ns/quire-defaults")
    assert dict(found.values) == {("engine", "maxModelLength"): 512}


def test_a_spec_of_the_wrong_shape_stays_as_it_is() -> None:
    spec = {"model": MODEL, "engine": "wrong"}
    assert apply_defaults(spec, layers(CLUSTER)).spec["engine"] == "wrong"
