"""The objects that the chart renders from its values, without a cluster."""

import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import trustme
import yaml
from chart_support.documents import container, find, of_kind
from chart_support.values import DIGEST, EVERYTHING, VARIANTS

from quire_cluster.helm import Helm, HelmFailed
from quire_common.served_names import NameScope
from quire_gateway.config import KubernetesSource, parse_config
from quire_operator.app.settings import parse_settings
from quire_operator.autoscaling.engine_metrics import ReplicaLabels

ROOT = Path(__file__).parents[2]
CHART = ROOT / "charts" / "quire"
DEFAULTS = yaml.safe_load((CHART / "values.yaml").read_text())

variants = pytest.mark.parametrize("values", VARIANTS.values(), ids=VARIANTS.keys())


Mounted = Callable[[list[str]], list[str]]


@pytest.fixture
def mounted(tmp_path: Path) -> Mounted:
    """Return a function that replaces paths in arguments by files with the contents that a pod would have mounted."""
    authority = trustme.CA()
    leaf = authority.issue_cert("gateway.example")

    def place(argument: str) -> str:
        flag, _, value = argument.partition("=")
        if not value.startswith("/etc/quire/"):
            return argument
        file = tmp_path / value.removeprefix("/etc/quire/")
        file.parent.mkdir(exist_ok=True)
        pem = leaf.private_key_pem if file.name == "tls.key" else leaf.cert_chain_pems[0]
        file.write_bytes(authority.cert_pem.bytes() if file.name == "ca.crt" else pem.bytes())
        return f"{flag}={file}"

    return lambda arguments: [place(argument) for argument in arguments]


@variants
def test_helm_lint_reports_no_warning(helm: Helm, values: dict[str, Any]) -> None:
    report = helm.on_chart("lint", "--strict", values=values)
    assert "0 chart(s) failed" in report
    assert "WARNING" not in report


@variants
def test_every_object_has_the_release_labels(helm: Helm, values: dict[str, Any]) -> None:
    for document in helm.template(values):
        if document["kind"] != "CustomResourceDefinition":
            labels = document["metadata"]["labels"]
            assert labels["app.kubernetes.io/instance"] == "quire"
            assert labels["app.kubernetes.io/component"] in {"operator", "gateway", "roles", "monitoring"}


def test_crds_of_the_chart_equal_those_in_crds(helm: Helm) -> None:
    """On failure run make generate."""
    crds = of_kind(helm.template(), "CustomResourceDefinition")
    assert all(crd["metadata"].pop("annotations") == {"helm.sh/resource-policy": "keep"} for crd in crds)
    kept = [yaml.safe_load(file.read_text()) for file in sorted((ROOT / "crds").glob("*.yaml"))]
    assert sorted(crds, key=lambda crd: str(crd["metadata"]["name"])) == kept


def test_crd_installation_can_be_disabled(helm: Helm) -> None:
    assert of_kind(helm.template({"crds": {"create": False}}), "CustomResourceDefinition") == []


@variants
def test_operator_flags_are_valid_and_match_the_values(helm: Helm, mounted: Mounted, values: dict[str, Any]) -> None:
    name = f"{values.get('fullnameOverride', 'quire')}-operator"
    told = container(helm.template(values), name)
    settings = parse_settings(mounted(told["args"]), {})
    expected = DEFAULTS["operator"] | values.get("operator", {})
    assert settings.watch_namespaces == tuple(values.get("watchNamespaces", ()))
    assert settings.namespace == "llm"
    assert settings.lease_name == name
    assert settings.workers == expected["workers"]
    assert settings.resync_seconds == {"10m": 600.0, "90s": 90.0}[expected["resync"]]
    assert settings.cluster_domain == expected["clusterDomain"]
    assert settings.images.hub_endpoint == (expected["hubEndpoint"] or None)
    assert (settings.prometheus is None) == (not expected["prometheus"].get("url"))
    if settings.prometheus is not None:
        assert settings.prometheus.url == expected["prometheus"]["url"]
        assert settings.prometheus.labels == ReplicaLabels(namespace="namespace", pod="kubernetes_pod_name")
    assert settings.log_level == expected["logLevel"]
    assert settings.port == told["ports"][0]["containerPort"]


def test_operator_identity_is_its_pod_name(helm: Helm) -> None:
    """Its identity is that of the pod, so that a restarted container recognizes its own Lease."""
    values: dict[str, str] = {"metadata.name": "r" * 63, "metadata.uid": "01234567-89ab-cdef-0123-456789abcdef"}
    environment: dict[str, str] = {}
    for variable in container(helm.template(), "quire-operator")["env"]:
        path = variable.get("valueFrom", {}).get("fieldRef", {}).get("fieldPath")
        text = variable["value"] if path is None else values[path]
        environment[variable["name"]] = re.sub(r"\$\((\w+)\)", lambda match: environment[match[1]], text)
    told = parse_settings([], environment)
    assert told.identity == f"{values['metadata.name']}_{values['metadata.uid']}"


def test_credentials_of_prometheus_are_mounted_for_the_operator(helm: Helm) -> None:
    prometheus = {
        "url": "https://p",
        "tokenSecret": {"name": "reader", "key": "bearer"},
        "caConfigMap": {"name": "authority"},
    }
    documents = helm.template({"operator": {"prometheus": prometheus}})
    told = container(documents, "quire-operator")
    mounts = {mount["mountPath"]: mount["name"] for mount in told["volumeMounts"]}
    spec = find(documents, "Deployment", "quire-operator")["spec"]["template"]["spec"]
    volumes = {volume["name"]: volume for volume in spec["volumes"]}
    flags = dict(argument.removeprefix("--").split("=", 1) for argument in told["args"])
    token, authority = Path(flags["prometheus-token-file"]), Path(flags["prometheus-ca-file"])
    assert volumes[mounts[str(token.parent)]]["secret"] == {"secretName": "reader"}
    assert volumes[mounts[str(authority.parent)]]["configMap"] == {"name": "authority"}
    assert (token.name, authority.name) == ("bearer", "ca.crt")


@pytest.mark.parametrize("values", [{}, EVERYTHING, {"watchNamespaces": ["llm"]}])
def test_gateway_flags_are_valid_and_match_the_values(helm: Helm, mounted: Mounted, values: dict[str, Any]) -> None:
    name = f"{values.get('fullnameOverride', 'quire')}-gateway"
    documents = helm.template(values)
    told = container(documents, name)
    config = parse_config(mounted(told["args"]), {})
    expected = DEFAULTS["gateway"] | values.get("gateway", {})
    # With keys, the gateways count themselves by their own Service.
    own = find(documents, "Service", name)["metadata"] if config.api_key_file else None
    assert config.source == KubernetesSource(
        namespaces=tuple(values.get("watchNamespaces", ())),
        kubeconfig=None,
        gateway_service=None if own is None else (own["namespace"], own["name"]),
        scope=NameScope(expected["servedNames"].lower()),
    )
    assert config.proxy.body_memory_bytes == max(expected["bodyMemoryBytes"], expected["maxBodyBytes"])
    assert config.proxy.hides_names == expected["hideNames"]
    assert config.proxy.shares_prefixes == (expected["sharePrefixes"] == "all")
    assert config.max_connections == expected["maxConnections"]
    assert config.port == told["ports"][0]["containerPort"]
    assert config.proxy.hold_limit == expected["holdLimit"]
    assert config.proxy.hold_timeout_seconds == expected["holdTimeoutSeconds"]
    assert config.proxy.max_body_bytes == expected["maxBodyBytes"]
    assert config.drain_timeout_seconds == expected["drainTimeoutSeconds"]
    assert config.log_level == expected["logLevel"]


def test_a_gateway_may_finish_its_drain_before_it_is_killed(helm: Helm) -> None:
    pod = find(helm.template({"gateway": {"drainTimeoutSeconds": 300}}), "Deployment", "quire-gateway")
    spec = pod["spec"]["template"]["spec"]
    pre_stop = spec["containers"][0]["lifecycle"]["preStop"]["sleep"]["seconds"]
    assert spec["terminationGracePeriodSeconds"] > pre_stop + 300


@pytest.mark.parametrize(
    ("images", "expected"),
    [
        ({}, "quire-operator:0.1.0"),
        ({"tag": "1.2"}, "quire-operator:1.2"),
        ({"registry": "registry.example/team"}, "registry.example/team/quire-operator:0.1.0"),
        ({"registry": "localhost:5000/"}, "localhost:5000/quire-operator:0.1.0"),
        ({"tag": "1.2", "operator": {"tag": "1.3"}}, "quire-operator:1.3"),
        ({"operator": {"repository": "mine/operator"}}, "mine/operator:0.1.0"),
        ({"tag": "1.2", "operator": {"digest": DIGEST}}, f"quire-operator@{DIGEST}"),
    ],
)
def test_an_image_is_named_once_and_for_all(helm: Helm, images: dict[str, Any], expected: str) -> None:
    assert container(helm.template({"images": images}), "quire-operator")["image"] == expected


@pytest.mark.parametrize("release", ["quire", "my-quire", "chat", "r" * 53])
def test_names_fit_and_are_unique_across_namespaces(helm: Helm, release: str) -> None:
    here, there = helm.template(release=release, namespace="here"), helm.template(release=release, namespace="there")
    assert max(len(document["metadata"]["name"]) for document in of_kind(here, "Service", "Deployment")) <= 63
    roles = [{role["metadata"]["name"] for role in of_kind(side, "ClusterRole")} for side in (here, there)]
    assert roles[0].isdisjoint(roles[1])


def rules(documents: list[dict[str, Any]], component: str = "") -> Iterator[tuple[str, dict[str, Any]]]:
    for role in of_kind(documents, "Role", "ClusterRole"):
        if component in ("", role["metadata"]["labels"]["app.kubernetes.io/component"]):
            for rule in role["rules"]:
                yield role["kind"], rule


@variants
def test_rights_have_no_wildcards_and_no_secrets_or_logs(helm: Helm, values: dict[str, Any]) -> None:
    for _, rule in rules(helm.template(values)):
        assert "*" not in [*rule["apiGroups"], *rule["resources"], *rule["verbs"]]
        assert not {"pods/log", "pods/exec"} & set(rule["resources"])
        assert "secrets" not in rule["resources"] or rule["verbs"] == ["create"], "they are never read"
        assert not {"escalate", "bind", "impersonate"} & set(rule["verbs"])


@pytest.mark.parametrize(
    ("values", "verbs", "flag"),
    [
        ({}, ["list"], "auto"),
        ({"operator": {"capacityCheck": {"enabled": False}}}, None, "off"),
        ({"watchNamespaces": ["team-a"]}, None, "auto"),
    ],
)
def test_nodes_are_listed_only_for_cluster_wide_capacity_checks(
    helm: Helm, values: dict[str, Any], verbs: list[str] | None, flag: str
) -> None:
    documents = helm.template(values)
    given = [rule["verbs"] for _, rule in rules(documents) if "nodes" in rule["resources"]]
    assert given == ([] if verbs is None else [verbs])
    assert f"--capacity-check={flag}" in container(documents, "quire-operator")["args"]


def test_named_namespaces_need_only_the_crd_cluster_wide(helm: Helm) -> None:
    documents = helm.template({"watchNamespaces": ["team-a", "team-b"]})
    for component in ("operator", "gateway"):
        everywhere = [rule for kind, rule in rules(documents, component) if kind == "ClusterRole"]
        assert all(rule["resourceNames"] == ["llmdeployments.quire.dev"] for rule in everywhere)
    gateway = [role for role in of_kind(documents, "Role") if role["metadata"]["name"] == "quire-gateway"]
    assert [role["metadata"]["namespace"] for role in gateway] == ["team-a", "team-b"]


@variants
def test_each_binding_names_an_existing_role_and_account(helm: Helm, values: dict[str, Any]) -> None:
    documents = helm.template(values)
    there = {(d["kind"], d["metadata"]["name"], d["metadata"].get("namespace")) for d in documents}
    for binding in of_kind(documents, "RoleBinding", "ClusterRoleBinding"):
        role, (subject,) = binding["roleRef"], binding["subjects"]
        namespace = binding["metadata"].get("namespace") if role["kind"] == "Role" else None
        assert (role["kind"], role["name"], namespace) in there
        assert (subject["kind"], subject["name"], subject["namespace"]) in there


@variants
def test_each_selector_finds_its_own_pods_alone(helm: Helm, values: dict[str, Any]) -> None:
    documents = helm.template(values)
    pods = {
        d["metadata"]["name"]: d["spec"]["template"]["metadata"]["labels"] for d in of_kind(documents, "Deployment")
    }
    for document in of_kind(documents, "Deployment", "Service", "PodDisruptionBudget"):
        selector = document["spec"]["selector"]
        wanted = selector.get("matchLabels", selector).items()
        expected = document["metadata"]["name"].replace("-webhook", "-operator")  # a Service of the operator
        assert [name for name, labels in pods.items() if wanted <= labels.items()] == [expected]


@pytest.mark.parametrize("deployment", ["quire-operator", "quire-gateway"])
def test_openshift_assigns_the_user_of_all_pods(helm: Helm, deployment: str) -> None:
    fixed = find(helm.template({}), "Deployment", deployment)["spec"]["template"]["spec"]["securityContext"]
    assert (fixed["runAsUser"], fixed["runAsGroup"]) == (65532, 65532)
    documents = helm.template({"runAsUser": None, "podSecurityContext": {"supplementalGroups": [7]}})
    context = find(documents, "Deployment", deployment)["spec"]["template"]["spec"]["securityContext"]
    assert context == {
        "runAsNonRoot": True,
        "seccompProfile": {"type": "RuntimeDefault"},
        "supplementalGroups": [7],
    }
    assert parse_settings(container(documents, "quire-operator")["args"], {}).images.user_id is None


@pytest.mark.parametrize("component", ["operator", "gateway"])
def test_proxy_and_authorities_reach_the_container(helm: Helm, component: str) -> None:
    found = container(helm.template(EVERYTHING), f"inference-{component}")
    (extra,) = EVERYTHING[component]["extraEnv"]
    assert extra in found["env"]
    assert EVERYTHING[component]["extraVolumeMounts"][0] in found["volumeMounts"]


def test_common_labels_are_on_every_object_and_in_no_selector(helm: Helm) -> None:
    for document in helm.template({"commonLabels": {"cost": "ml"}}):
        if document["kind"] != "CustomResourceDefinition":
            assert document["metadata"]["labels"]["cost"] == "ml"
        assert "cost" not in str(document.get("spec", {}).get("selector", {}))


def test_common_labels_may_not_replace_the_charts_own(helm: Helm) -> None:
    with pytest.raises(HelmFailed, match="commonLabels"):
        helm.template({"commonLabels": {"app.kubernetes.io/name": "other"}})
