"""A canary on a real API server: two tracks, promotion and rollback."""

import json
from collections.abc import Iterator
from typing import Any

import pytest
from kube_support.operators import Namespace, OperatorProcess, Operators, until
from page_server import page_server

from quire_common.contract.gateway import TRACKS_PATH, bin_of

ROLLOUT = {"strategy": "Canary", "canary": {"steps": [{"weightPercent": 20, "duration": "10s"}], "minRequests": 100}}
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
