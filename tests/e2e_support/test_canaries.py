"""The view of ``status.rollout`` that scenarios read, and the change of a spec that gives replicas a fault."""

import pytest

from benchmarks.canary.faults import sitecustomize
from e2e_support.canaries import Progress, canary_rollout, progress_of, with_fault
from e2e_support.manifests import small_llmdeployment
from quire_operator.domain.resource import Spec

NONE = Progress(phase="", message="", weight_percent=0, stable="", canary="", rejected="", requests=0)
GATES = [{"metric": "TimeToFirstToken"}, {"metric": "ErrorRate", "canary": {"count": 70}}]


@pytest.mark.parametrize(
    ("rollout", "has_requests", "requests"),
    [
        ({}, False, 0),
        ({"phase": "Starting", "weightPercent": 0, "gates": []}, False, 0),
        ({"phase": "Canary", "weightPercent": 25, "gates": GATES}, True, 70),
        ({"phase": "RolledBack", "weightPercent": 0, "gates": GATES}, False, 70),
    ],
)
def test_status_is_read(rollout: dict[str, object], has_requests: bool, requests: int) -> None:
    found = progress_of({"rollout": rollout})
    assert (found.has_requests, found.requests) == (has_requests, requests)
    assert progress_of({}) == NONE


@pytest.mark.parametrize("fault", ["errors", "layer", "leak"])
def test_fault_is_a_valid_change_of_the_spec(fault: str) -> None:
    rollout = canary_rollout({"metric": "ErrorRate"}, weight=50, min_requests=50, max_requests=100)
    body = small_llmdeployment("chat", rollout=rollout, **with_fault(fault))
    assert isinstance(Spec.parse(body), Spec)


@pytest.mark.parametrize(
    ("command", "serves", "computes"),
    [
        (["/opt/quire/bin/python", "/opt/quire/bin/quire-engine", "--model", "m"], True, False),
        (["python", "-m", "quire_engine", "--model", "m"], True, False),
        (["python", "-P", "-m", "quire_engine.ipc.loop"], False, True),
        (["python", "-m", "quire_engine.text.renderer"], False, False),
        (["python", "-m", "pytest"], False, False),
    ],
)
def test_fault_is_installed_where_it_belongs(command: list[str], serves: bool, computes: bool) -> None:
    assert sitecustomize.is_server(command) is serves
    assert sitecustomize.is_loop(command) is computes
