"""The status of an LLMAdapter from the reports of the replicas, and its Events."""

from dataclasses import replace
from typing import Any

import pytest

from quire_common.contract.adapters_file import AdapterEntry, AdapterFailure, AdapterReport, AdapterState
from quire_common.served_names import Claim
from quire_operator.kube.trimming import trim_adapter
from quire_operator.lora.placement import Listing, Refusal
from quire_operator.lora.status import ReplicaReport, adapter_events, adapter_status

RESOURCE = trim_adapter({"metadata": {"name": "a", "namespace": "prod", "generation": 3}, "spec": {}})
LISTED = Listing(
    resource=RESOURCE,
    claim=Claim(namespace="prod", deployment="chat", name="a", since="2026-01-01T00:00:00Z", adapter="a"),
    entry=AdapterEntry(name="a", source="s3://a/a"),
)


def reports(*states: AdapterState | None, **more: Any) -> list[ReplicaReport]:
    """Return the reports of replicas; None: the replica has not read the list yet."""
    return [
        ReplicaReport(
            replica=f"pod-{place}",
            answered=True,
            adapter=None if state is None else AdapterReport(name="a", generation=0, state=state, **more),
        )
        for place, state in enumerate(states)
    ]


def status(listing: Listing, replicas: list[ReplicaReport], *, desired: int | None = 1) -> dict[str, Any]:
    return adapter_status(listing, replicas, desired_replicas=desired, now=1_800_000_000.0)


def condition(found: dict[str, Any], kind: str) -> str:
    (wanted,) = [each for each in found["conditions"] if each["type"] == kind]
    return f"{wanted['status']} {wanted['reason']}"


S = AdapterState


@pytest.mark.parametrize(
    ("replicas", "ready", "loaded", "count"),
    [
        (reports(S.READY, S.LOADED), "True Serving", "True Loaded", 2),
        (reports(S.READY, S.KNOWN), "True Serving", "False OnDemand", 1),
        (reports(S.READY, S.DOWNLOADING), "False Loading", "False Loading", 1),
        (reports(S.READY, None), "False Loading", "False Loading", 1),
        (reports(), "False NoReplica", "False NoReplica", 0),
        (
            reports(S.READY) + reports(S.FAILED, reason=AdapterFailure.NO_ROOM, message="full"),
            "False NoRoom",
            "False NoRoom",
            1,
        ),
    ],
)
def test_conditions_follow_the_replicas(replicas: list[ReplicaReport], ready: str, loaded: str, count: int) -> None:
    found = status(LISTED, replicas)
    assert (condition(found, "Ready"), condition(found, "Loaded")) == (ready, loaded)
    assert (found["loadedReplicas"], found["replicas"]) == (count, len(replicas))
    assert found["observedGeneration"] == 3


@pytest.mark.parametrize("reason", AdapterFailure)
def test_each_failure_of_an_engine_is_a_reason(reason: AdapterFailure) -> None:
    found = status(LISTED, reports(S.FAILED, reason=reason, message="the reason in full"))
    assert condition(found, "Ready") == f"False {reason}"
    assert "the reason in full" in found["conditions"][0]["message"]


@pytest.mark.parametrize("refusal", Refusal)
def test_each_refusal_is_a_reason(refusal: Refusal) -> None:
    found = status(replace(LISTED, entry=None, refusal=refusal, message="why"), [])
    assert condition(found, "Ready") == f"False {refusal}"
    assert condition(found, "Loaded") == f"False {refusal}"


def test_adapter_with_a_taken_name_is_still_loaded() -> None:
    found = status(replace(LISTED, refusal=Refusal.NAME_TAKEN, message="why"), reports(S.READY))
    assert (condition(found, "Ready"), condition(found, "Loaded")) == ("False NameTaken", "True Loaded")


def test_zero_replicas_on_purpose_are_healthy() -> None:
    assert condition(status(LISTED, [], desired=0), "Ready") == "True ScaledToZero"


def test_an_engine_without_reports_is_named() -> None:
    old = ReplicaReport(replica="pod-old", answered=False)
    found = status(LISTED, [*reports(S.READY), old])
    assert "pod-old" in found["conditions"][0]["message"]


def test_different_versions_are_all_shown() -> None:
    mixed = reports(S.READY, revision="b", rank=4) + reports(S.READY, revision="a", rank=8)
    found = status(LISTED, mixed)
    assert (found["revision"], found["rank"]) == ("a, b", 8)


def test_events_are_for_changes_of_ready() -> None:
    loading, serving = status(LISTED, reports(S.DOWNLOADING)), status(LISTED, reports(S.READY))
    failed = status(LISTED, reports(S.FAILED, reason=AdapterFailure.WRONG_BASE, message="why"))
    assert adapter_events({}, loading) == ()
    assert [(event.warning, event.reason) for event in adapter_events(loading, serving)] == [(False, "Serving")]
    assert [(event.warning, event.reason) for event in adapter_events(serving, failed)] == [(True, "WrongBase")]
    assert adapter_events(failed, failed) == ()
