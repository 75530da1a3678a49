"""``quire explain`` shows a canary: its state, and each gate with both tracks."""

import io
import json
from datetime import UTC, datetime
from typing import Any

import msgspec
from rich.console import Console

from quire_cli.inspection.explanation import Explanation, OperatorReport, of_resource, render
from quire_operator.kube.trimming import trim_resource

FIGURES = {"count": 812, "p50Microseconds": 181_000, "percentileMicroseconds": 1_420_000}
ROLLOUT: dict[str, Any] = {
    "phase": "Canary",
    "stableRevision": "aaaa",
    "canaryRevision": "bbbb",
    "weightPercent": 5,
    "message": "step 1 of 3 (5 %): 812 requests, 12m left",
    "gates": [
        {
            "metric": "TimeToFirstToken",
            "percentile": 95,
            "verdict": "Waiting",
            "message": "not yet certain (+4 %)",
            "stable": FIGURES,
            "canary": FIGURES,
        },
        {
            "metric": "ErrorRate",
            "verdict": "Passed",
            "message": "1 of 812 requests failed (0.12 %)",
            "stable": {"count": 9000, "errors": 9},
            "canary": {"count": 812, "errors": 1},
        },
    ],
}


def explained(**status: Any) -> Explanation:
    body = {
        "apiVersion": "quire.dev/v1alpha1",
        "kind": "LLMDeployment",
        "metadata": {"name": "chat", "namespace": "prod"},
        "spec": {"model": {"source": "file:///m"}},
        "status": status,
    }
    return of_resource(trim_resource(body), OperatorReport(log=(), problem=None), place="cluster", now=0.0)


def shown(found: Explanation) -> str:
    console = Console(width=240, record=True, file=io.StringIO())
    console.print(render(found, now=datetime.now(UTC), last=5))
    return console.export_text()


def test_gates_are_shown_for_both_tracks() -> None:
    text = shown(explained(rollout=ROLLOUT))
    assert "Canary bbbb against stable aaaa, 5 % of the requests: step 1 of 3 (5 %): 812 requests, 12m left" in text
    assert "TimeToFirstToken p95" in text and "1.42 s (median 181 ms, 812 requests)" in text
    assert "Waiting  not yet certain (+4 %)" in text
    assert "9 of 9000 (0.10 %)" in text and "1 of 812 (0.12 %)" in text
    found = json.loads(msgspec.json.encode(explained(rollout=ROLLOUT)))
    assert found["canary"] == ROLLOUT


def test_nothing_is_shown_without_a_canary() -> None:
    assert explained().canary is None
    assert explained(rollout={"phase": "Stable", "stableRevision": "aaaa", "message": ""}).canary is None


def test_finished_canary_stays_visible() -> None:
    text = shown(
        explained(rollout={"phase": "RolledBack", "stableRevision": "aaaa", "message": "revision bbbb failed"})
    )
    assert "RolledBack" in text and "revision bbbb failed" in text
