"""The chart's validating webhook: its certificate, its namespaces, and what an upgrade keeps."""

import base64
import json
import ssl
from pathlib import Path
from typing import Any

import pytest

from quire_cluster.control_plane import ControlPlane
from quire_cluster.errors import HelmFailed
from quire_cluster.helm import Helm
from quire_operator.app.settings import parse_settings

OWN: dict[str, Any] = {"webhook": {"create": True}}
GIVEN = {
    "webhook": {"create": True, "certificate": {"secretName": "mine", "caBundle": "-----BEGIN CERTIFICATE-----\nx"}}
}
ISSUED = {"webhook": {"create": True, "certificate": {"issuer": {"kind": "Issuer", "name": "corp"}}}}


def kinds(documents: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Return the objects of the webhook by kind."""
    mine = [d for d in documents if "webhook" in d["metadata"]["name"]]
    assert len({d["kind"] for d in mine}) == len(mine)
    return {d["kind"]: d for d in mine}


def operator_pod(documents: list[dict[str, Any]]) -> dict[str, Any]:
    (found,) = [d for d in documents if d["kind"] == "Deployment" and d["metadata"]["name"].endswith("-operator")]
    pod: dict[str, Any] = found["spec"]["template"]["spec"]
    return pod


def decoded(text: str) -> bytes:
    return base64.b64decode(text, validate=True)


def test_webhook_is_disabled_by_default(helm: Helm) -> None:
    documents = helm.template()
    assert kinds(documents) == {}
    assert not any("webhook" in arg for arg in operator_pod(documents)["containers"][0]["args"])


def test_certificate_of_the_chart_matches_service_and_bundle(helm: Helm, tmp_path: Path) -> None:
    made = kinds(helm.template(OWN))
    secret, (webhook, of_adapters) = made["Secret"], made["ValidatingWebhookConfiguration"]["webhooks"]
    files = {name: tmp_path / name for name in ("tls.crt", "tls.key")}
    for name, file in files.items():
        file.write_bytes(decoded(secret["data"][name]))
    server = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    server.load_cert_chain(files["tls.crt"], files["tls.key"])
    client = ssl.create_default_context(cadata=decoded(webhook["clientConfig"]["caBundle"]).decode())
    service = webhook["clientConfig"]["service"]

    shake_hands(client, server, name=f"{service['name']}.{service['namespace']}.svc")

    assert of_adapters["clientConfig"] == {
        **webhook["clientConfig"],
        "service": {**service, "path": "/llmadapters"},
    }
    assert [rule["resources"] for rule in of_adapters["rules"]] == [["llmadapters"]]
    assert (service["name"], service["port"]) == (made["Service"]["metadata"]["name"], 443)


def shake_hands(client: ssl.SSLContext, server: ssl.SSLContext, *, name: str) -> None:
    """Perform a handshake in memory. Raises the error of either side."""
    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    sides = [
        client.wrap_bio(to_client, to_server, server_hostname=name),
        server.wrap_bio(to_server, to_client, server_side=True),
    ]
    while sides:
        for side in tuple(sides):
            try:
                side.do_handshake()
            except ssl.SSLWantReadError:
                continue
            sides.remove(side)


def test_operator_gets_the_certificate_and_accepts_its_flags(helm: Helm, tmp_path: Path) -> None:
    documents = helm.template(OWN)
    pod, secret = operator_pod(documents), kinds(documents)["Secret"]
    container = pod["containers"][0]
    (volume,) = [v for v in pod["volumes"] if v.get("secret", {}).get("secretName") == secret["metadata"]["name"]]
    (mount,) = [m for m in container["volumeMounts"] if m["name"] == volume["name"]]
    for name in ("tls.crt", "tls.key"):
        (tmp_path / name).write_bytes(decoded(secret["data"][name]))

    settings = parse_settings([arg.replace(mount["mountPath"], str(tmp_path)) for arg in container["args"]], {})

    assert settings.webhook is not None
    (port,) = [p for p in container["ports"] if p["name"] == "webhook"]
    assert settings.webhook.port == port["containerPort"]


def test_webhook_uses_an_existing_secret(helm: Helm) -> None:
    made = kinds(helm.template(GIVEN))
    assert "Secret" not in made
    webhook, _ = made["ValidatingWebhookConfiguration"]["webhooks"]
    assert decoded(webhook["clientConfig"]["caBundle"]).startswith(b"-----BEGIN CERTIFICATE-----")
    volumes = operator_pod(helm.template(GIVEN))["volumes"]
    assert {"secretName": "mine"} in [v.get("secret") for v in volumes]


def test_webhook_uses_a_cert_manager_issuer(helm: Helm) -> None:
    made = kinds(helm.template(ISSUED, namespace="llm"))
    certificate, configuration = made["Certificate"], made["ValidatingWebhookConfiguration"]
    assert certificate["spec"]["issuerRef"] == {"kind": "Issuer", "name": "corp"}
    named = configuration["metadata"]["annotations"]["cert-manager.io/inject-ca-from"]
    assert named == f"llm/{certificate['metadata']['name']}"
    assert "caBundle" not in configuration["webhooks"][0]["clientConfig"]


def test_webhook_covers_only_watched_namespaces(helm: Helm) -> None:
    configuration = kinds(helm.template({**OWN, "watchNamespaces": ["a", "b"]}))["ValidatingWebhookConfiguration"]
    for webhook in configuration["webhooks"]:
        (expression,) = webhook["namespaceSelector"]["matchExpressions"]
        assert expression == {"key": "kubernetes.io/metadata.name", "operator": "In", "values": ["a", "b"]}


def test_a_bundle_that_is_no_certificate_is_refused(helm: Helm) -> None:
    with pytest.raises(HelmFailed, match="caBundle"):
        helm.template({"webhook": {"create": True, "certificate": {"caBundle": "bm90IHBlbQ=="}}})


def test_an_upgrade_keeps_the_certificate(cluster_helm: Helm, crd_server: ControlPlane, namespace: str) -> None:
    values = {**OWN, "crds": {"create": False}, "watchNamespaces": [namespace]}
    try:
        cluster_helm.on_chart("install", "hooked", f"--namespace={namespace}", values=values)
        before = certificates(crd_server, namespace)
        cluster_helm.on_chart("upgrade", "hooked", f"--namespace={namespace}", values=values)
        assert certificates(crd_server, namespace) == before
    finally:
        cluster_helm.run("uninstall", "hooked", f"--namespace={namespace}", "--ignore-not-found")


def certificates(server: ControlPlane, namespace: str) -> tuple[dict[str, str], str]:
    """Return the contents of the secret and the certificates that the API server trusts."""
    secret = json.loads(
        server.kubectl("get", "secret", "-n", namespace, "hooked-quire-webhook-certificate", "-o", "json")
    )
    name = f"hooked-quire.{namespace}.webhook"
    configuration = json.loads(server.kubectl("get", "validatingwebhookconfiguration", name, "-o", "json"))
    bundle = configuration["webhooks"][0]["clientConfig"]["caBundle"]
    assert bundle == secret["data"]["ca.crt"]
    return secret["data"], bundle
