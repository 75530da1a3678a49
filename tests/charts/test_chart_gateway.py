"""Access to the gateway: Ingress and HTTPRoute, TLS, keys, number of replicas, and network policies."""

from typing import Any

import pytest
from chart_support.documents import Documents, container, find, of_kind, pod_spec

from quire_cluster.helm import Helm
from quire_gateway.app import OPEN_PATHS
from quire_gateway.config import parse_config

TLS = {"gateway": {"tls": {"secretName": "gateway-tls"}}}


def flags(documents: Documents) -> dict[str, str]:
    arguments = container(documents, "quire-gateway")["args"]
    return dict(argument.removeprefix("--").split("=", 1) for argument in arguments if "=" in argument)


def mounts(documents: Documents) -> dict[str, dict[str, Any]]:
    """Return the volumes by mount path."""
    volumes = {volume["name"]: volume for volume in pod_spec(documents, "quire-gateway").get("volumes", [])}
    mounted = container(documents, "quire-gateway").get("volumeMounts", [])
    assert all(mount["readOnly"] for mount in mounted)
    return {mount["mountPath"]: volumes[mount["name"]] for mount in mounted}


def test_gateway_has_no_route_in_front_by_default(helm: Helm) -> None:
    kinds = {"Ingress", "HTTPRoute", "HorizontalPodAutoscaler", "NetworkPolicy", "PodMonitor", "PrometheusRule"}
    assert of_kind(helm.template(), *kinds, "ConfigMap", "Secret") == []
    without = {"create": False, "ingress": {"enabled": True}, "autoscaling": {"enabled": True}}
    assert of_kind(helm.template({"gateway": without}), *kinds) == []


@pytest.mark.parametrize(
    ("gateway", "replicas"),
    [({}, 2), ({"replicas": 0}, 0), ({"replicas": None}, None), ({"autoscaling": {"enabled": True}}, None)],
)
def test_replicas_are_omitted_if_autoscaled(helm: Helm, gateway: dict[str, Any], replicas: int | None) -> None:
    deployment = find(helm.template({"gateway": gateway}), "Deployment", "quire-gateway")
    assert deployment["spec"].get("replicas") == replicas


def test_hpa_scales_the_gateway_within_its_bounds(helm: Helm) -> None:
    autoscaling = {"enabled": True, "minReplicas": 3, "maxReplicas": 9, "targetCPUUtilizationPercentage": 65}
    documents = helm.template({"gateway": {"autoscaling": autoscaling}})
    spec = find(documents, "HorizontalPodAutoscaler", "quire-gateway")["spec"]
    find(documents, spec["scaleTargetRef"]["kind"], spec["scaleTargetRef"]["name"])
    assert (spec["minReplicas"], spec["maxReplicas"]) == (3, 9)
    (metric,) = spec["metrics"]
    assert metric["resource"] == {"name": "cpu", "target": {"type": "Utilization", "averageUtilization": 65}}
    assert container(documents, "quire-gateway")["resources"]["requests"]["cpu"], "utilization is of what is asked for"


# --- TLS and keys ---


@pytest.mark.parametrize(("values", "scheme", "port"), [({}, "http", 80), (TLS, "https", 443)])
def test_probes_service_and_scrapes_follow_the_scheme(
    helm: Helm, values: dict[str, Any], scheme: str, port: int
) -> None:
    documents = helm.template(values | {"monitoring": {"podMonitors": {"enabled": True}}})
    told = container(documents, "quire-gateway")
    (name,) = [p["name"] for p in told["ports"]]
    probes = [probe["httpGet"] for key, probe in told.items() if key.endswith("Probe")]
    assert len(probes) == 3
    assert {(probe["scheme"], probe["port"]) for probe in probes} == {(scheme.upper(), name)}
    (service,) = find(documents, "Service", "quire-gateway")["spec"]["ports"]
    assert (service["port"], service["targetPort"], service["appProtocol"]) == (port, name, scheme)
    template = find(documents, "Deployment", "quire-gateway")["spec"]["template"]
    assert template["metadata"]["annotations"]["prometheus.io/scheme"] == scheme
    (endpoint,) = find(documents, "PodMonitor", "quire-gateway")["spec"]["podMetricsEndpoints"]
    assert (endpoint["port"], endpoint.get("scheme", "http")) == (name, scheme)
    assert ("ssl-certfile" in flags(documents)) == (scheme == "https")


def test_explicit_port_is_kept_with_tls(helm: Helm) -> None:
    documents = helm.template({"gateway": TLS["gateway"] | {"service": {"port": 8443}}})
    (service,) = find(documents, "Service", "quire-gateway")["spec"]["ports"]
    assert service["port"] == 8443


def test_certificate_is_mounted_where_the_gateway_reads_it(helm: Helm) -> None:
    documents = helm.template(TLS)
    assert flags(documents)["ssl-certfile"] == "/etc/quire/tls/tls.crt"
    assert flags(documents)["ssl-keyfile"] == "/etc/quire/tls/tls.key"
    assert mounts(documents)["/etc/quire/tls"]["secret"] == {"secretName": "gateway-tls"}


def test_keys_of_the_gateway_change_without_a_restart(helm: Helm) -> None:
    documents = helm.template({"gateway": {"auth": {"secretName": "keys"}}})
    assert flags(documents)["api-key-file"] == "/etc/quire/api-keys/keys"
    volume = mounts(documents)["/etc/quire/api-keys"]
    assert volume["secret"] == {"secretName": "keys", "items": [{"key": "keys", "path": "keys"}]}
    # A file mounted with subPath would keep the contents that it had when the pod started.
    assert all("subPath" not in mount for mount in container(documents, "quire-gateway")["volumeMounts"])


def test_nothing_is_mounted_without_tls_and_keys(helm: Helm) -> None:
    documents = helm.template()
    assert mounts(documents) == {}
    config = parse_config(container(documents, "quire-gateway")["args"], {})
    assert (config.tls, config.api_key_file) == (None, None)


# --- Ingress and HTTPRoute ---


def backends(documents: Documents) -> set[tuple[str, object]]:
    """Return the Services and ports to which Ingress and HTTPRoute send requests."""
    found: set[tuple[str, object]] = set()
    for ingress in of_kind(documents, "Ingress"):
        for rule in ingress["spec"]["rules"]:
            for path in rule["http"]["paths"]:
                service = path["backend"]["service"]
                found.add((service["name"], service["port"]["name"]))
    for route in of_kind(documents, "HTTPRoute"):
        for rule in route["spec"]["rules"]:
            found |= {(reference["name"], reference["port"]) for reference in rule["backendRefs"]}
    return found


@pytest.mark.parametrize("values", [{}, TLS["gateway"]], ids=["http", "https"])
def test_ingress_and_route_use_a_port_of_the_service(helm: Helm, values: dict[str, Any]) -> None:
    ways = {"ingress": {"enabled": True}, "httpRoute": {"enabled": True, "parentRefs": [{"name": "public"}]}}
    documents = helm.template({"gateway": values | ways})
    (service,) = [s for s in of_kind(documents, "Service") if s["metadata"]["name"] == "quire-gateway"]
    (port,) = service["spec"]["ports"]
    assert backends(documents) == {("quire-gateway", port["name"]), ("quire-gateway", port["port"])}


@pytest.mark.parametrize(
    ("given", "timeouts"),
    [({}, {"request": "0s"}), ({"timeouts": {"request": "1h"}}, {"request": "1h"}), ({"timeouts": None}, None)],
)
def test_route_has_no_time_limit_unless_given(
    helm: Helm, given: dict[str, Any], timeouts: dict[str, str] | None
) -> None:
    documents = helm.template({"gateway": {"httpRoute": {"enabled": True, "parentRefs": [{"name": "a"}], **given}}})
    (rule,) = find(documents, "HTTPRoute", "quire-gateway")["spec"]["rules"]
    assert rule.get("timeouts") == timeouts


def test_routes_without_a_key_are_not_exposed(helm: Helm) -> None:
    ways = {"ingress": {"enabled": True}, "httpRoute": {"enabled": True, "parentRefs": [{"name": "public"}]}}
    documents = helm.template({"gateway": ways})
    (rule,) = find(documents, "Ingress", "quire-gateway")["spec"]["rules"]
    (route,) = find(documents, "HTTPRoute", "quire-gateway")["spec"]["rules"]
    paths = [path["path"] for path in rule["http"]["paths"]]
    assert [match["path"]["value"] for match in route["matches"]] == paths
    assert "/v1" in paths
    assert [path for path in OPEN_PATHS if any(path.startswith(way) for way in paths)] == []


def test_ingress_matches_its_hosts_or_any(helm: Helm) -> None:
    def hosts(given: list[str]) -> list[str | None]:
        documents = helm.template({"gateway": {"ingress": {"enabled": True, "hosts": given}}})
        return [rule.get("host") for rule in find(documents, "Ingress", "quire-gateway")["spec"]["rules"]]

    assert hosts([]) == [None]
    assert hosts(["a.example", "*.b.example"]) == ["a.example", "*.b.example"]


# --- network policies ---


def peers(documents: Documents, name: str) -> list[dict[str, Any]] | None:
    """Return the peers of the policy's first rule; None if it admits everyone."""
    rule = find(documents, "NetworkPolicy", name)["spec"]["ingress"][0]
    result: list[dict[str, Any]] | None = rule.get("from")
    return result


def test_policies_select_the_pods_and_their_ports(helm: Helm) -> None:
    documents = helm.template({"networkPolicies": {"enabled": True}, "webhook": {"create": True}})
    for component in ("operator", "gateway"):
        name = f"quire-{component}"
        policy = find(documents, "NetworkPolicy", name)["spec"]
        labels = find(documents, "Deployment", name)["spec"]["template"]["metadata"]["labels"]
        assert policy["podSelector"]["matchLabels"].items() <= labels.items()
        assert policy["policyTypes"] == ["Ingress"]
        open_ports = [port["port"] for rule in policy["ingress"] for port in rule["ports"]]
        assert open_ports == [port["name"] for port in container(documents, name)["ports"]]
        assert peers(documents, name) is None


def test_named_peers_and_metrics_scrapers_are_admitted(helm: Helm) -> None:
    team, monitoring = {"namespaceSelector": {"matchLabels": {"team": "ml"}}}, {"ipBlock": {"cidr": "192.0.2.0/24"}}
    policies = {"enabled": True, "gatewayFrom": [team], "metricsFrom": [monitoring]}
    documents = helm.template({"networkPolicies": policies})
    assert peers(documents, "quire-operator") == [monitoring]
    operator = find(documents, "Deployment", "quire-operator")["spec"]["selector"]
    assert peers(documents, "quire-gateway") == [team, monitoring, {"podSelector": operator}]
    only_metrics = helm.template({"networkPolicies": policies | {"gatewayFrom": []}})
    assert peers(only_metrics, "quire-gateway") is None, "requests come by the same port"


# --- notes after the installation ---


@pytest.mark.parametrize(
    ("values", "parts"),
    [
        ({}, ["port-forward service/quire-gateway 8000:80", "curl http://127.0.0.1", "quire-engine:0.1.0"]),
        (TLS, ["8000:443", "curl --insecure https://127.0.0.1:8000/v1/chat/completions"]),
        ({"gateway": {"auth": {"secretName": "k"}}}, ['-H "Authorization: Bearer $KEY"', "keys in the secret k"]),
        ({"gateway": {"ingress": {"enabled": True, "hosts": ["llm.example"]}}}, ["http://llm.example/v1"]),
        ({"gateway": {"create": False}}, ["Service of each LLMDeployment"]),
        ({"watchNamespaces": ["team-a"]}, ["serves the LLMDeployments of team-a", "namespace: team-a"]),
        ({}, ["monitoring.alerts.enabled", "keeps the CRD"]),
    ],
)  # fmt: skip
def test_notes_explain_how_to_reach_the_installation(helm: Helm, values: dict[str, Any], parts: list[str]) -> None:
    told = helm.on_chart("install", "quire", "--namespace=llm", "--dry-run=client", "--hide-secret", values=values)
    notes = told.partition("NOTES:")[2]
    assert [part for part in parts if part not in notes] == []
    assert "\n\n\n" not in notes
