"""quire-operator's command line and environment."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from quire_common.errors import FlagsError
from quire_operator import __version__
from quire_operator.app.settings import parse_settings
from quire_operator.autoscaling.engine_metrics import PrometheusOptions, ReplicaLabels


def test_defaults_watch_all_namespaces_as_the_pods_account() -> None:
    settings = parse_settings([], {})
    assert (settings.kubeconfig, settings.namespace, settings.watch_namespaces) == (None, None, ())
    assert (settings.workers, settings.resync_seconds, settings.lease_name) == (32, 600.0, "quire-operator")
    assert settings.images.engine == f"quire-engine:{__version__}"
    assert settings.images.rocm_engine == f"quire-engine-rocm:{__version__}"


def test_flags_precede_variables_and_variables_defaults() -> None:
    environment = {
        "QUIRE_OPERATOR_WORKERS": "3",
        "QUIRE_OPERATOR_PORT": "1",
        "QUIRE_OPERATOR_WATCH_NAMESPACE": "a, b",
        "QUIRE_OPERATOR_ENGINE_IMAGE": "registry.example:5000/engine@sha256:abc",
    }
    settings = parse_settings(["--workers", "5"], environment)
    assert (settings.workers, settings.port) == (5, 1)
    assert settings.watch_namespaces == ("a", "b")
    assert settings.images.engine == "registry.example:5000/engine@sha256:abc"
    assert parse_settings(["--watch-namespace", "c", "d"], environment).watch_namespaces == ("c", "d")


def test_two_processes_have_two_identities() -> None:
    assert parse_settings([], {}).identity != parse_settings([], {}).identity


def test_every_problem_names_its_flag_or_variable() -> None:
    argv = ["--workers", "many", "--resync", "1s", "--engine-image", "two words", "--identity", "a b"]
    with pytest.raises(FlagsError) as refused:
        parse_settings(argv, {"QUIRE_OPERATOR_PORT": "99999", "QUIRE_OPERATOR_HUB_ENDPOINT": "ftp://x"})
    details = refused.value.problems
    assert len(details) == 6
    where = (
        "--workers",
        "--resync",
        "--engine-image",
        "--identity",
        "QUIRE_OPERATOR_PORT",
        "QUIRE_OPERATOR_HUB_ENDPOINT",
    )
    assert all(any(detail.startswith(f"{name}: expected ") for detail in details) for name in where)


def test_prometheus_is_configured(tmp_path: Path) -> None:
    token = tmp_path / "token"
    token.write_text("t")
    assert parse_settings([], {}).prometheus is None
    argv = ["--prometheus-url", "https://p:9090", "--prometheus-token-file", str(token)]
    options = parse_settings(argv, {"QUIRE_OPERATOR_PROMETHEUS_POD_LABEL": "pod_name"}).prometheus
    labels = ReplicaLabels(namespace="namespace", pod="pod_name")
    assert options == PrometheusOptions(url="https://p:9090", token_file=token, labels=labels)


def test_wrong_prometheus_settings_are_problems(tmp_path: Path) -> None:
    (tmp_path / "ca").write_text("no certificate")
    argv = ["--prometheus-url", "p:9090", "--prometheus-token-file", str(tmp_path / "none")]
    argv += ["--prometheus-ca-file", str(tmp_path / "ca"), "--prometheus-pod-label", "a-b"]
    with pytest.raises(FlagsError) as refused:
        parse_settings(argv, {})
    names = sorted(detail.partition(":")[0] for detail in refused.value.problems)
    assert names == ["--prometheus-ca-file", "--prometheus-pod-label", "--prometheus-token-file", "--prometheus-url"]


@pytest.mark.parametrize(
    ("argv", "code", "says"),
    [
        (["--help"], 0, "usage: quire-operator"),
        (["--no-such-flag"], 2, "--no-such-flag is unknown"),
        (["--wake-by-service=on"], 2, "--wake-by-service was removed: requests to the Service of a model no longer"),
        (["--kubeconfig", "/no/such/file"], 1, "no Kubernetes cluster found"),
    ],
)
def test_error_is_one_screen_without_a_traceback(argv: list[str], code: int, says: str) -> None:
    command, environ = [sys.executable, "-m", "quire_operator", *argv], {**os.environ, "COLUMNS": "118"}
    done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=60)
    output = done.stdout + done.stderr
    assert done.returncode == code
    assert says in output and "Traceback" not in output
    assert len(output.splitlines()) <= 100


def test_gateways_have_labels_or_addresses() -> None:
    none = parse_settings([], {})
    assert (none.gateway_selector, none.gateway_urls) == (None, ())
    argv = ["--gateway-selector", "app.kubernetes.io/name=quire,app=gw", "--gateway-url", "http://a:1", "https://b"]
    given = parse_settings(argv, {})
    assert (given.gateway_selector, given.gateway_urls) == (
        "app.kubernetes.io/name=quire,app=gw",
        ("http://a:1", "https://b"),
    )
    with pytest.raises(FlagsError) as refused:
        parse_settings(["--gateway-selector", "a b", "--gateway-url", "a:1"], {})
    assert [detail.partition(":")[0] for detail in refused.value.problems] == ["--gateway-selector", "--gateway-url"]


def test_capacity_check_can_be_turned_off() -> None:
    assert parse_settings([], {}).capacity_check
    assert not parse_settings(["--capacity-check", "off"], {}).capacity_check
    with pytest.raises(FlagsError) as refused:
        parse_settings([], {"QUIRE_OPERATOR_CAPACITY_CHECK": "on"})
    assert refused.value.problems == ("QUIRE_OPERATOR_CAPACITY_CHECK: expected one of auto, off, got 'on'",)
