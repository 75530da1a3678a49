"""quire-operator's command line and environment."""

import subprocess
import sys

import pytest

from quire_operator import __version__
from quire_operator.errors import SettingsProblem
from quire_operator.settings import parse_settings


def test_defaults_act_everywhere_as_the_pod_that_it_is() -> None:
    settings = parse_settings([], {})
    assert (settings.kubeconfig, settings.namespace, settings.watch_namespaces) == (None, None, ())
    assert (settings.workers, settings.resync_seconds, settings.lease_name) == (32, 600.0, "quire-operator")
    assert settings.images.engine == f"quire-engine:{__version__}"


def test_flags_stand_above_the_environment_and_that_above_the_defaults() -> None:
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


def test_every_problem_is_listed_with_where_it_was_said() -> None:
    argv = ["--workers", "many", "--resync", "1s", "--engine-image", "two words", "--identity", "a b"]
    with pytest.raises(SettingsProblem) as refused:
        parse_settings(argv, {"QUIRE_OPERATOR_PORT": "99999", "QUIRE_OPERATOR_HUB_ENDPOINT": "ftp://x"})
    details = refused.value.details
    assert len(details) == 6
    where = (
        "--workers",
        "--resync",
        "--engine-image",
        "--identity",
        "QUIRE_OPERATOR_PORT",
        "QUIRE_OPERATOR_HUB_ENDPOINT",
    )
    assert all(any(detail.startswith(f"{name}: must be ") for detail in details) for name in where)


@pytest.mark.parametrize(
    ("argv", "code", "says"),
    [
        (["--help"], 0, "usage: quire-operator"),
        (["--no-such-flag"], 2, "unrecognized arguments: --no-such-flag"),
        (["--kubeconfig", "/no/such/file"], 1, "no way to a Kubernetes cluster"),
    ],
)
def test_a_mistake_is_told_on_one_screen_without_a_traceback(argv: list[str], code: int, says: str) -> None:
    done = subprocess.run([sys.executable, "-m", "quire_operator", *argv], capture_output=True, text=True, timeout=60)
    output = done.stdout + done.stderr
    assert done.returncode == code
    assert says in output and "Traceback" not in output
    assert len(output.splitlines()) <= 60
