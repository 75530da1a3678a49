"""A canary on a real API server: two tracks, promotion and rollback, and an operator that is killed at every write."""

import json
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from kube_support.operators import Namespace, OperatorProcess, Operators, until
from page_server import page_server

from quire_cluster.control_plane import ControlPlane
from quire_common.contract.gateway import TRACKS_PATH, bin_of

ROLLOUT = {
    "strategy": "Canary",
    "canary": {"steps": [{"weightPercent": 20, "duration": "10s"}], "minRequests": 100},
}
OLD: dict[str, Any] = {"replicas": 2, "rollout": ROLLOUT, "engine": {"maxSequences": 8}}
NEW: dict[str, Any] = {**OLD, "engine": {"maxSequences": 16}}
OTHER: dict[str, Any] = {**OLD, "engine": {"maxSequences": 32}}


def track(requests: int, seconds: float = 0.1) -> dict[str, Any]:
    spread = {str(bin_of(seconds * (0.7 + 0.02 * step))): requests // 30 + 1 for step in range(30)}
    return {"requests": requests, "errors": 0, "latencies": {"timeToFirstToken": spread}}


GOOD = {"stable": track(4000), "canary": track(2000)}
SLOW = {"stable": track(4000), "canary": track(2000, seconds=0.3)}


class Page:
    """The page of a gateway: the same figures for each revision that a test names."""

    def __init__(self) -> None:
        self.tracks: dict[str, Any] = {}
        self.revision = ""
        self.url = ""

    def answer(self, path: str) -> tuple[int, str]:
        chat = {"revision": self.revision, "tracks": self.tracks}
        return 200, json.dumps({"models": {"chat": chat} if path == TRACKS_PATH and self.tracks else {}})


def rollout(space: Namespace) -> dict[str, Any]:
    return dict(((space.get("llmdeployments", "chat") or {}).get("status") or {}).get("rollout") or {})


def sequences(space: Namespace, name: str) -> str | None:
    deployment = space.get("deployments", name)
    if deployment is None:
        return None
    arguments = deployment["spec"]["template"]["spec"]["containers"][0]["args"]
    return str(arguments[arguments.index("--max-num-seqs") + 1])


def drive(space: Namespace) -> None:
    """Let the kubelets that are missing here run all pods."""
    space.run_pods("chat")


def reaches(space: Namespace, phase: str, *, sequences_of_stable: str, why: Any = None) -> None:
    def is_there() -> bool:
        drive(space)
        return rollout(space).get("phase") == phase and sequences(space, "chat") == sequences_of_stable

    until(is_there, why=why or (lambda: rollout(space)))


@pytest.fixture
def page() -> Iterator[Page]:
    found = Page()
    with page_server(found.answer) as found.url:
        yield found


def start(space: Namespace, operators: Operators, page: Page, **options: Any) -> OperatorProcess:
    return operators.start(*space.flags(), "--gateway-url", page.url, identity=space.name, tick_seconds=1.0, **options)


def settle(space: Namespace) -> None:
    space.apply(**OLD)
    reaches(space, "Stable", sequences_of_stable="8")
    until(lambda: len(space.pods("chat")) == 2)


def test_good_canary_is_promoted(space: Namespace, operators: Operators, page: Page) -> None:
    operator = start(space, operators, page)
    settle(space)
    space.apply(**NEW)
    until(lambda: (drive(space), rollout(space).get("weightPercent") == 20)[1], why=lambda: rollout(space))
    assert (sequences(space, "chat"), sequences(space, "chat-canary")) == ("8", "16")
    assert len(space.names("controllerrevisions")) == 2
    assert "chat-canary" in space.names("services")
    page.revision, page.tracks = rollout(space)["canaryRevision"], GOOD
    reaches(space, "Stable", sequences_of_stable="16", why=lambda: (rollout(space), operator.last_words()))
    until(lambda: "chat-canary" not in space.names("deployments"))
    assert "chat-canary" not in space.names("services") and len(space.names("controllerrevisions")) == 1
    operator.kill()


def test_bad_canary_is_rolled_back_and_a_new_edit_tried(space: Namespace, operators: Operators, page: Page) -> None:
    operator = start(space, operators, page)
    settle(space)
    space.apply(**NEW)
    until(lambda: (drive(space), rollout(space).get("weightPercent") == 20)[1], why=lambda: rollout(space))
    page.revision, page.tracks = rollout(space)["canaryRevision"], SLOW
    reaches(space, "RolledBack", sequences_of_stable="8")
    until(lambda: "chat-canary" not in space.names("deployments"))
    degraded = space.wait_reason("chat", "Degraded", "CanaryRolledBack")
    assert "TimeToFirstToken p95" in degraded["message"]
    assert rollout(space)["gates"][0]["verdict"] == "Failed"
    space.apply(**OTHER)
    until(lambda: sequences(space, "chat-canary") == "32")
    assert sequences(space, "chat") == "8"
    operator.kill()


def test_canary_without_traffic_waits_until_it_is_withdrawn(space: Namespace, operators: Operators, page: Page) -> None:
    """It waits without requests, also paused, and changing the spec back removes it by hand."""
    operator = start(space, operators, page)
    settle(space)
    space.apply(**NEW)
    until(lambda: (drive(space), rollout(space).get("weightPercent") == 20)[1], why=lambda: rollout(space))
    until(lambda: "no gateway reports this canary" in rollout(space)["message"], why=lambda: rollout(space))
    page.revision, page.tracks = rollout(space)["canaryRevision"], {"stable": track(0), "canary": track(0)}
    until(lambda: "no request has reached the canary" in rollout(space)["message"], why=lambda: rollout(space))
    space.apply(**NEW, paused=True)
    until(lambda: "spec.paused is true" in rollout(space)["message"], why=lambda: rollout(space))
    page.tracks = GOOD
    until(lambda: rollout(space)["gates"][0]["verdict"] == "Passed", why=lambda: rollout(space))
    assert (rollout(space)["phase"], rollout(space)["weightPercent"]) == ("Canary", 20)
    space.apply(**OLD)
    reaches(space, "Stable", sequences_of_stable="8")
    until(lambda: "chat-canary" not in space.names("deployments"))
    assert "changed back" in rollout(space)["message"] and "rejectedRevision" not in rollout(space)
    operator.kill()


def test_operator_killed_before_each_kind_of_write_converges(
    crd_installed: ControlPlane, operators: Operators, page: Page, tmp_path: Path
) -> None:
    """An undisturbed promotion shows the writes; then it runs once for each kind, and the operator dies before it.

    ``tests/operator/reconcile/test_canary.py`` kills it before every single write.
    """
    spaces: list[Namespace] = []

    def new_space() -> Namespace:
        name = f"canary-{uuid.uuid4().hex[:8]}"
        assert crd_installed.client().post("/api/v1/namespaces", {"metadata": {"name": name}}).ok
        spaces.append(Namespace(crd_installed, name))
        return spaces[-1]

    def armed(space: Namespace) -> Path:
        return tmp_path / space.name

    first = new_space()
    operator = start(first, operators, page, armed_by=armed(first))
    settle(first)
    armed(first).touch()
    first.apply(**NEW)
    until(lambda: bool(rollout(first).get("canaryRevision")))
    # The revision is the same in all namespaces, because their specs are.
    page.revision, page.tracks = rollout(first)["canaryRevision"], GOOD
    reaches(first, "Stable", sequences_of_stable="16")
    until(lambda: "chat-canary" not in first.names("deployments"))
    operator.kill()
    writes = operator.writes()
    assert {"create ControllerRevision", "create Deployment", "create Service", "delete Deployment"} <= set(writes)
    doomed = {write: new_space() for write in dict.fromkeys(writes)}
    running = {
        write: start(space, operators, page, before_write=write, armed_by=armed(space))
        for write, space in doomed.items()
    }
    try:
        for space in doomed.values():
            settle(space)
        for space in doomed.values():
            armed(space).touch()
            space.apply(**NEW)

        def have_died() -> bool:
            for space in doomed.values():
                drive(space)
            return not any(each.is_alive for each in running.values())

        until(have_died, why=lambda: [write for write, each in running.items() if each.is_alive])
        for each in running.values():
            each.kill()
        running = {write: start(space, operators, page) for write, space in doomed.items()}
        for write, space in doomed.items():
            reaches(space, "Stable", sequences_of_stable="16", why=lambda w=write, s=space: (w, rollout(s)))
            until(lambda space=space: "chat-canary" not in space.names("deployments"))
            until(lambda space=space: space.names("controllerrevisions") == first.names("controllerrevisions"))
    finally:
        for each in running.values():
            each.kill()
        for space in spaces:
            # Without its finalizer, or an operator of a later test would find it in a namespace that ends.
            if space.get("llmdeployments", "chat") is not None:
                space.patch("llmdeployments", "chat", {"metadata": {"finalizers": None}})
            crd_installed.client().delete(f"/api/v1/namespaces/{space.name}")
        until(lambda: all(space.get("llmdeployments", "chat") is None for space in spaces))
