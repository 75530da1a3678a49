"""The validating webhook, called by a real API server: the output of kubectl, and the behaviour without it."""

import base64
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from kube_support.operators import Namespace, OperatorProcess, Operators, until

from quire_cluster.certificates import Authority, KeyPair
from quire_cluster.errors import KubectlFailed
from quire_cluster.ports import free_ports

WEBHOOK = "validatingwebhookconfigurations"
REGISTRATION = "/apis/admissionregistration.k8s.io/v1"


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    created = Authority(tmp_path / "pki")
    created.create()
    return created


class Webhook:
    """An operator that serves reviews, and the API server's webhook configuration."""

    def __init__(self, space: Namespace, operators: Operators, authority: Authority, folder: Path) -> None:
        (self.port,) = free_ports(1)
        self._space, self._operators, self._authority = space, operators, authority
        self._started: list[OperatorProcess] = []
        self._pair = KeyPair(certificate=folder / "tls.crt", key=folder / "tls.key")
        self.renew("first")

    def renew(self, name: str) -> bytes:
        """Write another certificate to the same files."""
        made = self._authority.issue(name, subject=f"/CN={name}", alternative_names="IP:127.0.0.1")
        shutil.copyfile(made.key, self._pair.key)
        shutil.copyfile(made.certificate, self._pair.certificate)
        return made.certificate.read_bytes()

    def start(self, **options: Any) -> OperatorProcess:
        flags = ("--webhook-certificate", str(self._pair.certificate), "--webhook-key", str(self._pair.key))
        self._started.append(
            self._operators.start(*self._space.flags(), *flags, "--webhook-port", str(self.port), **options)
        )
        return self._started[-1]

    def register(self, *, policy: str = "Fail") -> None:
        """Register as the chart does, but with an address on loopback and for this namespace only."""
        bundle = base64.b64encode(self._authority.pair.certificate.read_bytes()).decode()
        webhook = {
            "name": "llmdeployments.quire.dev",
            "clientConfig": {"url": f"https://127.0.0.1:{self.port}/llmdeployments", "caBundle": bundle},
            "rules": [
                {
                    "apiGroups": ["quire.dev"],
                    "apiVersions": ["v1alpha1"],
                    "operations": ["CREATE", "UPDATE"],
                    "resources": ["llmdeployments"],
                }
            ],
            "namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": self._space.name}},
            "failurePolicy": policy,
            "sideEffects": "None",
            "admissionReviewVersions": ["v1"],
        }
        body = {"metadata": {"name": self._space.name}, "webhooks": [webhook]}
        client = self._space.server.client()
        client.delete(f"{REGISTRATION}/{WEBHOOK}/{self._space.name}")
        answer = client.post(f"{REGISTRATION}/{WEBHOOK}", body)
        assert answer.ok, answer.body

    def apply(self, name: str, spec: dict[str, Any], *, dry: bool = False) -> str:
        """Return the output of kubectl, or its error."""
        body = {
            "apiVersion": "quire.dev/v1alpha1",
            "kind": "LLMDeployment",
            "metadata": {"name": name, "namespace": self._space.name},
            "spec": spec,
        }
        flags = ["--dry-run=server"] if dry else []
        try:
            said: str = self._space.server.kubectl("apply", *flags, "-f", "-", stdin=yaml.safe_dump(body))
            return said
        except KubectlFailed as error:
            return str(error)

    def stop(self) -> None:
        """Stop the operators before the namespace, and with it the permissions, is deleted."""
        for operator in self._started:
            operator.kill()
        self._space.server.client().delete(f"{REGISTRATION}/{WEBHOOK}/{self._space.name}")


@pytest.fixture
def webhook(space: Namespace, operators: Operators, authority: Authority, tmp_path: Path) -> Iterator[Webhook]:
    made = Webhook(space, operators, authority, tmp_path)
    yield made
    made.stop()


WRONG = {
    "model": {"source": "hf://org/name"},
    "engine": {"extraArgs": ["--no-such-flag", "--port=1"]},
    "podTemplate": {"spec": {"hostNetwork": True}},
}


def wait_judged(webhook: Webhook) -> None:
    """Wait until the webhook answers: the API server must learn of it, and the operator must start."""
    until(lambda: "--no-such-flag" in webhook.apply("judged", WRONG, dry=True))


def test_kubectl_shows_all_errors_at_once_and_stores_nothing(space: Namespace, webhook: Webhook) -> None:
    operator = webhook.start()
    webhook.register()
    wait_judged(webhook)

    said = webhook.apply("wrong", WRONG)

    assert "denied the request" in said
    for path in ("spec.engine.extraArgs[0]", "spec.engine.extraArgs[1]", "spec.podTemplate.spec.hostNetwork"):
        assert path in said
    assert space.names("llmdeployments") == []

    said = webhook.apply("wrong", WRONG | {"engine": {}, "podTemplate": {"spec": {"nodeSelektor": {}}}})
    assert "nodeSelektor" in said and "the API server rejected the Deployment" in said

    assert "created" in webhook.apply("right", {"model": {"source": "hf://org/name"}, "replicas": 2})
    assert "configured" in webhook.apply("right", {"model": {"source": "hf://org/name"}, "replicas": 3})
    assert "denied the request" in webhook.apply("right", WRONG)
    space.wait_settled("right")
    space.delete("llmdeployments", "right")
    until(lambda: space.names("llmdeployments") == [])
    told = [line for line in operator.lines() if line.get("level") in ("warning", "error")]
    assert told == [], "a rejection is for the client and not for the operator's log"


def test_standby_reviews_and_its_dry_run_needs_no_fence(
    space: Namespace, webhook: Webhook, operators: Operators
) -> None:
    leader = operators.start(*space.flags(), identity="leader")
    space.wait_holder("leader")
    webhook.start(identity="standby")
    webhook.register()
    wait_judged(webhook)
    said = webhook.apply("wrong", {"model": {"source": "hf://o/n"}, "podTemplate": {"spec": {"priority": "high"}}})

    assert "the API server rejected the Deployment" in said
    assert space.holder() == "leader"
    leader.kill()
