"""The output for users: a table with phases and figures, or JSON lines."""

import io
import json
import logging
from collections.abc import Mapping
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path

import pytest
from rich.console import Console
from specs import valid_spec

from quire_cli.local.process import Phase
from quire_cli.local.state import ReplicaState, Rules, RunState, ServedState
from quire_cli.local.up import logging_to
from quire_cli.local.views import JsonLines, LiveTable, ReplicaMetrics, render
from quire_operator.api import MetricsSource
from quire_operator.autoscaling.observation import ReplicaSample
from quire_operator.autoscaling.schedules import recorded_bounds
from quire_operator.autoscaling.ticks import MetricsState, Tick, noted

FULL = Path("/dev/full")


def sample(time: float = 0.0, tokens: float = 0.0) -> ReplicaSample:
    return ReplicaSample(
        time=time,
        waiting=3,
        running=4,
        queued_prompt_tokens=100,
        kv_tokens_used=420,
        kv_tokens_capacity=1000,
        generation_tokens=tokens,
    )


def run_state() -> RunState:
    spec = valid_spec(autoscaling={"maxReplicas": 3})
    failed = ReplicaState(name="chat-1", phase=Phase.FAILED, reason="out of [memory]", restarts=2)
    tick = Tick(
        time=datetime.fromtimestamp(90.0, UTC),
        from_replicas=1,
        to_replicas=2,
        reason="ArrivingWork",
        message="scales 1 → 2: work for 1.6 replicas arrives",
        inputs={"work": 1.6},
        enforced=True,
        metrics=MetricsState(source=MetricsSource.PODS),
    )
    assert spec.autoscaling is not None
    served = ServedState(
        served_name="chat",
        replicas=2,
        ready_replicas=1,
        replica_states=(ReplicaState(name="chat-0", phase=Phase.READY), failed),
        decisions=noted((), tick, limit=5),
        autoscaling=Rules.of(spec.autoscaling, recorded_bounds(spec.autoscaling, None, 0.0)),
    )
    return RunState(
        pid=5,
        time=100.0,
        started=40.0,
        address="http://127.0.0.1:8000",
        file="/x/demo.yaml",
        phase=Phase.READY,
        deployments={"chat": served},
        processes={"gateway": 7},
    )


METRICS = ReplicaMetrics(samples={"chat-0": sample()}, tokens_per_second={"chat-0": 1234.5})


def test_table_shows_load_decision_and_replica_failures() -> None:
    out = io.StringIO()
    Console(file=out, width=110).print(render(run_state(), METRICS))
    text = out.getvalue()
    cells = [[cell.strip() for cell in line.split("│")[1:-1]] for line in text.splitlines() if line.startswith("│")]
    assert cells == [["chat-0", "Ready", "4", "3", "42 %", "1,234", ""], ["chat-1", "Failed", "–", "–", "–", "–", "2"]]
    assert "http://127.0.0.1:8000  ready  up 1m" in text
    assert "chat: 1 of 2 replicas ready (between 1 and 3)" in text
    assert "scales 1 → 2: work for 1.6 replicas arrives  10s ago" in text
    assert "chat-1 ended: out of [memory]" in text


def test_live_table_leaves_only_its_events() -> None:
    out = io.StringIO()
    view = LiveTable(Console(file=out, force_terminal=True, width=100))
    view.event("start", "starting [chat]")
    view.download("hf://a/b", 5, 10)
    view.show(run_state(), METRICS)
    view.event("decision", "nothing new", {"changed": False})
    view.event("decision", "scales 1 → 2", {"changed": True})
    view.close()
    assert "starting [chat]" in out.getvalue()
    assert "nothing new" not in out.getvalue()
    assert "scales 1 → 2" in out.getvalue()


def test_json_lines_are_one_object_each_with_the_events_fields() -> None:
    out = io.StringIO()
    view = JsonLines(out)
    view.event("phase", "chat-0 is\nready", {"process": "chat-0"})
    for done in range(0, 1001, 10):
        view.download("hf://a/b", done, 1000)
    lines = [json.loads(line) for line in out.getvalue().splitlines()]
    assert lines[0] | {"time": ""} == {"time": "", "event": "phase", "message": "chat-0 is\nready", "process": "chat-0"}
    assert [line["doneBytes"] for line in lines[1:]] == [0, 1000], "not more than one line in five seconds"


def test_tokens_per_second_are_averaged_and_survive_a_restart() -> None:
    metrics = ReplicaMetrics()

    def rates(**samples: ReplicaSample) -> Mapping[str, float]:
        metrics.update(samples)
        return metrics.tokens_per_second

    assert rates(a=sample(0.0, 1000)) == {}
    assert rates(a=sample(1.0, 1100)) == {"a": 100.0}
    for second in range(2, 9):
        latest = rates(a=sample(float(second), 1100 + 50.0 * (second - 1)))
    assert latest == {"a": 50.0}
    assert rates(a=sample(9.0, 10)) == {}
    assert rates(a=sample(10.0, 30)) == {"a": 20.0}
    assert rates() == {}


def test_closed_output_is_reported() -> None:
    class Closed(io.StringIO):
        def write(self, text: str) -> int:
            raise BrokenPipeError

    told: list[str] = []
    JsonLines(Closed(), on_gone=lambda: told.append("gone")).event("start", "starting")
    assert told == ["gone"]


@pytest.mark.skipif(not FULL.exists(), reason="/dev/full is Linux's")
def test_full_disk_does_not_end_the_run(capfd: pytest.CaptureFixture[str]) -> None:
    out = FULL.open("w")
    JsonLines(out).event("phase", "chat-0 is ready")
    with suppress(OSError):
        out.close()
    with logging_to(FULL):
        logging.getLogger("quire_operator.test").warning("state.json can't be written")
    assert capfd.readouterr() == ("", "")
