"""The gateway's configuration for the API server, and the errors without one."""

import base64

import pytest
import yaml

from quire_common.errors import ConfigurationError
from quire_gateway.endpoints.kubernetes import from_kubeconfig, in_cluster


def kubeconfig(**changes: object) -> dict:
    return {
        "current-context": "one",
        "contexts": [{"name": "one", "context": {"cluster": "c", "user": "u"}}],
        "clusters": [{"name": "c", "cluster": {"server": "http://127.0.0.1:8080/"}}],
        "users": [{"name": "u", "user": {"token": "t"}}],
    } | changes


def write(tmp_path, document: object):
    path = tmp_path / "config"
    path.write_text(document if isinstance(document, str) else yaml.safe_dump(document))
    return path


def test_token_of_the_current_context(tmp_path):
    access = from_kubeconfig(write(tmp_path, kubeconfig()))
    assert access.url == "http://127.0.0.1:8080"
    assert access.headers() == {"Authorization": "Bearer t"}


def test_token_file_is_read_each_time(tmp_path):
    (tmp_path / "token").write_text("first\n")
    access = from_kubeconfig(write(tmp_path, kubeconfig(users=[{"name": "u", "user": {"tokenFile": "token"}}])))
    assert access.headers()["Authorization"] == "Bearer first"
    (tmp_path / "token").write_text("second\n")
    assert access.headers()["Authorization"] == "Bearer second"


@pytest.mark.parametrize(
    ("document", "words"),
    [
        ("a: [", "cannot be read"),
        ("[]", "the file is not a mapping"),
        (kubeconfig(**{"current-context": None}), "no context is selected"),
        (kubeconfig(**{"current-context": "two"}), "no context 'two'"),
        (kubeconfig(clusters=[]), "no cluster 'c'"),
        (kubeconfig(clusters=[{"name": "c", "cluster": {}}]), "has no server address"),
        (kubeconfig(users=[{"name": "u", "user": {"exec": {"command": "aws"}}}]), "from a command"),
        (
            kubeconfig(clusters=[{"name": "c", "cluster": {"server": "https://h", "certificate-authority-data": "!"}}]),
            "certificates cannot be read",
        ),
        (
            kubeconfig(clusters=[{"name": "c", "cluster": {"server": "https://h", "certificate-authority": "no.crt"}}]),
            "certificates cannot be read",
        ),
        (
            kubeconfig(
                clusters=[
                    {
                        "name": "c",
                        "cluster": {
                            "server": "https://h",
                            "certificate-authority-data": base64.b64encode(b"no certificate").decode(),
                        },
                    }
                ]
            ),
            "certificates cannot be read",
        ),
    ],
)
def test_unusable_kubeconfig_is_reported_with_a_reason(tmp_path, document, words):
    with pytest.raises(ConfigurationError, match=words):
        from_kubeconfig(write(tmp_path, document))


def test_outside_a_pod_the_error_names_kubeconfig(tmp_path):
    with pytest.raises(ConfigurationError, match="add --kubeconfig FILE"):
        in_cluster({}, tmp_path)


def test_service_account_without_its_certificate(tmp_path):
    (tmp_path / "token").write_text("t")
    environ = {"KUBERNETES_SERVICE_HOST": "fd00::1", "KUBERNETES_SERVICE_PORT": "443"}
    with pytest.raises(ConfigurationError, match="ca.crt cannot be read"):
        in_cluster(environ, tmp_path)
