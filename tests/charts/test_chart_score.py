"""The chart's objects, rated by kube-score. Every finding is fixed, or accepted here with a reason."""

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml
from chart_support.values import VARIANTS

from quire_cluster.helm import Helm

EXCEPTED = {
    "container-image-pull-policy": "Tags do not move by default, and a registry that is down must not stop a restart.",
    "deployment-has-host-podantiaffinity": "A topology spread constraint prefers different nodes.",
    "pod-networkpolicy": "networkPolicies.enabled is off by default: only the user knows who calls the gateway.",
}
"""Checks whose findings are accepted, with the reason."""
EXCEPTED_IN = {
    "everything": {"container-security-context-user-group-id": "runAsUser is null: OpenShift assigns the user."},
    "least": {"deployment-has-poddisruptionbudget": "podDisruptionBudget.create is false."},
}
"""Checks whose findings are accepted because of the values of one variant."""
GOOD = 10
"""The grade of an object without a finding."""


def findings(kube_score: Path, documents: list[dict[str, Any]]) -> dict[str, list[str]]:
    """Return what kube-score finds: check → objects and comments."""
    done = subprocess.run(
        # Without a CPU limit, which throttles a process that disturbs no other one. Requests share CPUs fairly.
        [str(kube_score), "score", "--output-format=json", "--ignore-container-cpu-limit", "-"],
        input=yaml.safe_dump_all(documents),
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode in (0, 1), done.stderr
    found: dict[str, list[str]] = {}
    scored = json.loads(done.stdout)
    assert scored, "it knows none of the objects"
    for item in scored:
        for check in item["checks"]:
            if not check["skipped"] and check["grade"] < GOOD:
                comments = [comment["summary"] for comment in check["comments"] or ()]
                found.setdefault(check["check"]["id"], []).append(f"{item['object_name']}: {'; '.join(comments)}")
    return found


def scored(kube_score: Path, helm: Helm, values: dict[str, Any]) -> dict[str, list[str]]:
    documents = [d for d in helm.template(values) if d["kind"] != "CustomResourceDefinition"]
    return findings(kube_score, documents)


@pytest.mark.parametrize("variant", VARIANTS)
def test_every_finding_has_an_exception(kube_score: Path, helm: Helm, variant: str) -> None:
    found = scored(kube_score, helm, VARIANTS[variant])
    accepted = EXCEPTED | EXCEPTED_IN.get(variant, {})
    assert {check: where for check, where in found.items() if check not in accepted} == {}


def test_every_exception_is_needed(kube_score: Path, helm: Helm) -> None:
    found = {variant: scored(kube_score, helm, values).keys() for variant, values in VARIANTS.items()}
    assert EXCEPTED.keys() - set().union(*found.values()) == set()
    for variant, checks in EXCEPTED_IN.items():
        assert checks.keys() - found[variant] == set()


def test_objects_without_security_are_found(kube_score: Path, helm: Helm) -> None:
    documents = [d for d in helm.template({}) if d["kind"] == "Deployment"]
    for document in documents:
        del document["spec"]["template"]["spec"]["containers"][0]["securityContext"]
    assert "container-security-context-readonlyrootfilesystem" in findings(kube_score, documents)
