"""LLMAdapters on a real API server: the list that pods read, the reports of engines, and the status."""

import json
from collections.abc import Iterator
from typing import Any

import pytest
from kube_support.operators import Namespace, OperatorProcess, Operators, until
from page_server import page_server

from quire_common.contract.adapters_file import (
    ADAPTERS_PATH,
    AdapterEntry,
    AdapterFailure,
    AdapterReport,
    AdaptersReport,
    AdapterState,
    Slots,
    parse_adapters,
    render_report,
)

ADDRESS = "127.0.41.7"
"""The address of every pod here. The port of engines is fixed, so the address has to be unique on this machine."""
ROOM = {"adapters": {"maxRank": 8, "maxLoaded": 2}}


class Engine:
    """The report of an engine: what a test says about each adapter, by the name."""

    def __init__(self) -> None:
        self.adapters: dict[str, AdapterReport] = {}

    def load(self, entry: AdapterEntry, state: AdapterState = AdapterState.READY, **more: Any) -> None:
        self.adapters[entry.name] = AdapterReport(
            name=entry.name, generation=entry.generation, state=state, rank=8, **more
        )

    def answer(self, path: str) -> tuple[int, str]:
        report = AdaptersReport(adapters=list(self.adapters.values()), slots=Slots(total=2, used=0), loads_total=0)
        return (200, json.dumps(render_report(report))) if path == ADAPTERS_PATH else (404, "")


@pytest.fixture
def engine() -> Iterator[Engine]:
    found = Engine()
    with page_server(found.answer, address=ADDRESS, port=8000):
        yield found


@pytest.fixture
def operator(operators: Operators, space: Namespace) -> Iterator[OperatorProcess]:
    process = operators.start(*space.flags())
    space.wait_holder(process.identity)
    yield process
    process.kill()


def condition(space: Namespace, name: str, kind: str = "Ready") -> dict[str, Any]:
    conditions = (space.get("llmadapters", name) or {}).get("status", {}).get("conditions", [])
    return next((each for each in conditions if each["type"] == kind), {})


def wait_reason(space: Namespace, name: str, reason: str) -> dict[str, Any]:
    until(lambda: condition(space, name).get("reason") == reason, why=lambda: space.get("llmadapters", name))
    return condition(space, name)


def listed(space: Namespace, deployment: str = "chat") -> dict[str, AdapterEntry]:
    """Return the adapters in the ConfigMap, as an engine reads them."""
    found = space.get("configmaps", f"{deployment}-adapters")
    entries, problems = parse_adapters((found or {}).get("data", {}).get("adapters.json", '{"adapters": []}'))
    assert problems == []
    return {entry.name: entry for entry in entries}


def test_adapters_are_added_and_removed_without_a_restart(
    space: Namespace, operator: OperatorProcess, engine: Engine
) -> None:
    space.apply(replicas=1, engine=ROOM)
    until(lambda: space.pods("chat"))
    (pod,) = space.run_pods("chat", address=ADDRESS)
    space.apply_adapter("legal", source="s3://adapters/legal")
    until(lambda: "legal" in listed(space))
    wait_reason(space, "legal", "Loading")
    until(lambda: annotation(space, pod), why=lambda: space.get("pods", pod))  # the kubelet is hurried

    engine.load(listed(space)["legal"], revision="abc")
    assert wait_reason(space, "legal", "Serving")["status"] == "True"
    status = (space.get("llmadapters", "legal") or {})["status"]
    assert (status["loadedReplicas"], status["replicas"], status["revision"], status["rank"]) == (1, 1, "abc", 8)
    assert status["servedName"]["name"] == "legal"

    space.apply_adapter("legal", source="s3://adapters/other")  # is loaded again: the old report no longer counts
    wait_reason(space, "legal", "Loading")
    failed = {"reason": AdapterFailure.RANK_TOO_HIGH, "message": "rank 64 is more than 8"}
    engine.load(listed(space)["legal"], AdapterState.FAILED, **failed)
    assert "rank 64 is more than 8" in wait_reason(space, "legal", "RankTooHigh")["message"]
    until(lambda: [e for e in space.items("events") if e["reason"] == "RankTooHigh" and e["type"] == "Warning"])
    told = next(e for e in space.items("events") if e["reason"] == "RankTooHigh")
    assert (told["involvedObject"]["kind"], told["involvedObject"]["name"]) == ("LLMAdapter", "legal")

    space.delete("llmadapters", "legal")
    until(lambda: not listed(space))
    assert space.pods("chat") == [pod]
    space.apply(replicas=1)
    until(lambda: space.get("configmaps", "chat-adapters") is None)


def annotation(space: Namespace, pod: str) -> str | None:
    found = (space.get("pods", pod) or {})["metadata"].get("annotations", {}).get("quire.dev/adapters")
    return found if found is None else str(found)


def test_a_new_leader_keeps_the_list(space: Namespace, operators: Operators) -> None:
    """A process that has not listed all LLMAdapters yet must not write a shorter list: engines would unload."""
    first = operators.start(*space.flags())
    space.wait_holder(first.identity)
    space.apply(replicas=0, engine=ROOM)
    for name in ("x", "y", "z"):
        space.apply_adapter(name)
    until(lambda: len(listed(space)) == 3)
    before = (space.get("configmaps", "chat-adapters") or {})["metadata"]["resourceVersion"]
    first.terminate()
    second = operators.start(*space.flags())
    space.wait_holder(second.identity)
    space.apply_adapter("x", placement="OnDemand")
    until(lambda: listed(space)["x"].placement == "OnDemand")
    assert len(listed(space)) == 3
    managed = (space.get("configmaps", "chat-adapters") or {})["metadata"]
    assert int(managed["resourceVersion"]) > int(before)
    second.kill()
