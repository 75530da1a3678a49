"""``quire explain`` for users: where it finds its data, what it shows, and its error messages."""

import json
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import msgspec
import pytest
from rich.console import Console
from specs import valid_spec

from quire_cli.inspection.explanation import (
    Explanation,
    OperatorReport,
    fresh_stretches,
    key_inputs,
    line,
    of_resource,
    of_run,
    render,
)
from quire_cli.local.state import ReplicaState, Rules, ServedState
from quire_operator.api import MetricsSource
from quire_operator.autoscaling.schedules import recorded_bounds
from quire_operator.autoscaling.ticks import DemandTerm, Log, MetricsState, Tick, noted
from quire_operator.kube.trimming import trim_resource

NOW = datetime.fromtimestamp(1000.0, UTC)
PROD = "/apis/quire.dev/v1alpha1/namespaces/prod/llmdeployments"


def tick(second: float, was: int, to: int, reason: str, why: str, **inputs: float) -> Tick:
    return Tick(
        time=datetime.fromtimestamp(second, UTC),
        from_replicas=was,
        to_replicas=to,
        reason=reason,
        message=f"{was} → {to}: {why}" if was != to else f"stays at {to}: {why}",
        enforced=True,
        inputs={"needUp": 1.6, "needDown": 2.6, "waiting": 12, "running": 4, "ready": 1, "fresh": 1} | inputs,
        terms=(
            DemandTerm(reason="ArrivingWork", need=1.6, detail="3.10 requests/s are 1.28 busy replicas, over 0.8"),
            DemandTerm(reason="KVDemand", need=0.4, detail="812 KV tokens in use over 0.8 × 16,384 a replica"),
        ),
        metrics=MetricsState(source=MetricsSource.PROMETHEUS, oldest_seconds=4.0),
    )


def log() -> Log:
    told: Log = ()
    for each in (
        tick(900, 1, 2, "ArrivingWork", "ArrivingWork needs 1.60 replicas"),
        tick(915, 2, 2, "MetricsStale", "only 0 of 1 ready replicas gave metrics in the last 45 s", fresh=0),
        tick(930, 2, 2, "MetricsStale", "only 0 of 1 ready replicas gave metrics in the last 45 s", fresh=0),
        tick(990, 2, 2, "ScaleDownWindow", "1.60 replicas were needed 45s ago, within 1m"),
    ):
        told = noted(told, each, limit=10)
    return told


def rules() -> Rules:
    autoscaling = valid_spec(autoscaling={"maxReplicas": 3}).autoscaling
    assert autoscaling is not None
    return Rules.of(autoscaling, recorded_bounds(autoscaling, None, 0.0))


def served(**more: Any) -> ServedState:
    return ServedState(served_name="chat", replicas=2, ready_replicas=1, autoscaling=rules(), **more)


def drawn(told: Explanation, width: int, *, last: int = 10) -> str:
    console = Console(width=width, highlight=False)
    with console.capture() as capture:
        console.print(render(told, now=NOW, last=last))
    return capture.get()


def flat(text: str) -> str:
    """Return the text without the table's lines, so that sentences continue across rows."""
    return " ".join(text.replace("│", " ").split())


@pytest.mark.parametrize("width", [80, 140])
def test_explain_shows_current_state_and_history(width: int) -> None:
    told = of_run("chat", served(decisions=log()), place="quire up of f.yaml", ended=None)
    text = drawn(told, width)
    assert max(map(len, text.splitlines())) <= width
    seen = flat(text)
    assert "2 requested, 1 ready, 0 starting; between 1 and 3" in seen
    assert "ScaleDownWindow Stays at 2: 1.60 replicas were needed 45s ago, within 1m (10s ago)" in seen
    assert "from Prometheus: recent for 1 of 1 ready replicas, the oldest 4.0 s old" in seen
    assert "▸ ArrivingWork 1.60" in seen and "▸ KVDemand" not in seen
    assert "at once, by at most 4 or 100 %, the larger, per 15s" in seen
    assert "when one fewer was enough all through 5m, by at most 1 per 1m; current demand for this 2.60" in seen
    assert "for 15s" in seen, "two ticks without metrics are one row"
    assert seen.index("1 → 2") > seen.index("MetricsStale") > seen.index("Decisions"), "newest first"
    assert "need 1.6, waiting 12, running 4, ready 1, fresh 0" in seen


def test_only_the_last_rows_are_shown_and_the_rest_is_counted() -> None:
    told = of_run("chat", served(decisions=log()), place="here", ended=None)
    seen = flat(drawn(told, 120, last=1))
    assert "last 1 of 3; use --last for more" in seen and "MetricsStale" not in seen


def test_explain_shows_missing_metrics_and_failed_replicas() -> None:
    stale = noted((), tick(995, 2, 2, "MetricsStale", "only 0 of 1", fresh=0), limit=5)
    replicas = (
        ReplicaState(name="chat-0", phase="Ready", restarts=7, reason="long ago"),
        ReplicaState(name="chat-1", phase="Failed", restarts=3, reason="out of memory"),
        ReplicaState(name="chat-2", phase="Loading", restarts=1, reason="signal 9"),
        ReplicaState(name="chat-3", phase="Loading"),
    )
    told = of_run("chat", served(decisions=stale, replica_states=replicas), place="here", ended=None)
    assert [notice.subject for notice in told.notices] == ["Metrics", "chat-1", "chat-2"]
    seen = flat(drawn(told, 100))
    assert "chat-1: Failed process ended: out of memory; restarted 3 times" in seen
    assert "chat-2: Loading process ended: signal 9; restarted once" in seen


def test_fixed_replicas_need_no_decisions() -> None:
    told = of_run("chat", ServedState(served_name="m", replicas=1, ready_replicas=1), place="here", ended=None)
    assert "a fixed number (spec.autoscaling is not set)" in drawn(told, 100)
    assert told.now_missing is None


def test_each_stretch_is_one_line() -> None:
    told = of_run("chat", served(decisions=log()), place="here", ended=None)
    assert line(told, log()[0]) == "1970-01-01T00:15:00Z chat 1 → 2 ArrivingWork: ArrivingWork needs 1.60 replicas"
    assert [stretch.ticks for stretch in fresh_stretches(log()[:1], log())] == [2, 1]
    assert fresh_stretches(log(), log()) == []


def test_only_relevant_inputs_are_listed() -> None:
    assert key_inputs({"waiting": 0, "running": 0, "ready": 1, "fresh": 1, "starting": 0, "needUp": 0}) == (
        "waiting 0, running 0, ready 1"
    )
    assert key_inputs({"ready": 2, "fresh": 0}) == "ready 2, fresh 0"


# --- a cluster ---


def resource(name: str = "chat", **status: Any) -> dict[str, Any]:
    return {
        "apiVersion": "quire.dev/v1alpha1",
        "kind": "LLMDeployment",
        "metadata": {"name": name, "namespace": "prod"},
        "spec": {"model": {"source": "file:///m"}, "autoscaling": {"maxReplicas": 3}},
        "status": status,
    }


def change(second: int, was: int, to: int) -> dict[str, Any]:
    time = datetime.fromtimestamp(second, UTC).isoformat().replace("+00:00", "Z")
    why = f"{was} → {to}: because"
    return {"time": time, "from": was, "to": to, "reason": "KVDemand", "message": why, "inputs": {"waiting": "3"}}


def condition(kind: str, status: str, reason: str) -> dict[str, str]:
    return {"type": kind, "status": status, "reason": reason, "message": f"{reason} it is"}


def test_operator_log_extends_the_history_of_the_status() -> None:
    kept = {"desiredReplicas": 2, "history": [change(500, 3, 2), change(900, 1, 2)]}
    body = trim_resource(resource(desiredReplicas=2, readyReplicas=1, autoscaling=kept))
    told = of_resource(body, OperatorReport(log=log(), problem=None), place="there", now=0.0)
    assert [stretch.since.timestamp() for stretch in told.history] == [500, 900, 915, 990], "each decision once"
    assert told.now == log()[-1].last
    alone = of_resource(body, OperatorReport(log=(), problem="no process answers"), place="there", now=0.0)
    assert (alone.now, alone.now_missing, len(alone.history)) == (None, "no process answers", 2)
    assert (told.replicas.asked, told.replicas.ready, told.replicas.starting) == (2, 1, 1)


@pytest.mark.parametrize(
    ("found", "noticed"),
    [
        (("Autoscaling", "True", "Enforcing"), False),
        (("Autoscaling", "False", "MetricsStale"), True),
        (("Autoscaling", "False", "PrometheusUnavailable"), True),
        (("Autoscaling", "False", "ReplicasContested"), True),
        (("Autoscaling", "False", "NotConfigured"), False),
        (("Progressing", "True", "RollingOut"), True),
        (("Progressing", "True", "Scaling"), False),
        (("Ready", "False", "Unschedulable"), True),
        (("Degraded", "False", "AsExpected"), False),
    ],
)
def test_conditions_that_affect_replicas_are_shown(found: tuple[str, str, str], noticed: bool) -> None:
    body = trim_resource(resource(conditions=[condition(*found)]))
    told = of_resource(body, OperatorReport(log=(), problem=None), place="there", now=0.0)
    assert [notice.reason for notice in told.notices] == ([found[2]] if noticed else [])


def test_explain_uses_the_status_without_an_operator(quire: Any, api_answers: Any) -> None:
    history = {"desiredReplicas": 2, "history": [change(900, 1, 2)]}
    api_answers.answers = {
        f"{PROD}/chat": (200, resource(desiredReplicas=2, readyReplicas=2, autoscaling=history)),
        "/api/v1/pods": (200, {"items": []}),
    }
    code, out, _ = quire("explain", "chat", "--kubeconfig", api_answers.kubeconfig)
    assert code == 0
    assert "prod/chat  context gpu-cluster" in out
    assert "unknown: no pod of quire's operator runs in this cluster" in flat(out)
    assert "KVDemand Because" in flat(out)


def test_leader_of_several_operators_is_read(quire: Any, api_answers: Any) -> None:
    pods = [
        {"metadata": {"name": name, "namespace": "quire"}, "status": {"phase": phase}}
        for name, phase in (("a", "Pending"), ("b", "Running"), ("c", "Running"))
    ]
    api_answers.answers = {
        f"{PROD}/chat": (200, resource(desiredReplicas=2)),
        "/api/v1/pods": (200, {"items": pods}),
        "/api/v1/namespaces/quire/pods/b:8080/proxy/decisions/prod/chat": (404, "no decision"),
        "/api/v1/namespaces/quire/pods/c:8080/proxy/decisions/prod/chat": (200, msgspec.to_builtins(log())),
    }
    code, out, _ = quire("explain", "chat", "--kubeconfig", api_answers.kubeconfig, "--json")
    assert code == 0
    assert json.loads(out)["now"]["reason"] == "ScaleDownWindow"


def test_user_of_one_namespace_reads_the_operator_there(quire: Any, api_answers: Any) -> None:
    api_answers.answers = {
        f"{PROD}/chat": (200, resource(desiredReplicas=2)),
        "/api/v1/pods": (403, {"message": 'User "u" cannot list resource "pods" in API group "" at the cluster scope'}),
        "/api/v1/namespaces/prod/pods": (
            200,
            {"items": [{"metadata": {"name": "op", "namespace": "prod"}, "status": {"phase": "Running"}}]},
        ),
        "/api/v1/namespaces/prod/pods/op:8080/proxy/decisions/prod/chat": (200, msgspec.to_builtins(log())),
    }
    where = ("--kubeconfig", api_answers.kubeconfig, "--json")
    assert json.loads(quire("explain", "chat", *where)[1])["now"] is not None
    del api_answers.answers["/api/v1/namespaces/prod/pods"]
    told = json.loads(quire("explain", "chat", *where)[1])
    assert (
        told["nowMissing"]
        == "you are not allowed to list pods in all namespaces, which reading from the operator requires"
    )


@pytest.mark.parametrize(
    ("answers", "code", "words"),
    [
        ({}, 1, ["this cluster has no kind LLMDeployment", "install quire's chart"]),
        (
            {
                f"{PROD}/caht": (404, {"message": 'llmdeployments.quire.dev "caht" not found'}),
                PROD: (200, {"items": [resource(), resource("code")]}),
            },
            1,
            ["there is no LLMDeployment caht in namespace prod of context gpu-cluster", "did you mean chat?"],
        ),
        (
            {f"{PROD}/caht": (401, {"message": "Unauthorized"})},
            1,
            ["our credentials were not accepted", "log in again"],
        ),
        ({f"{PROD}/caht": (503, {"message": "etcd is away"})}, 1, ["etcd is away", "try again"]),
    ],
)
def test_cluster_read_errors_fit_one_screen(
    quire: Any, api_answers: Any, answers: dict[str, Any], code: int, words: list[str]
) -> None:
    api_answers.answers = answers
    ended, out, err = quire("explain", "caht", "--kubeconfig", api_answers.kubeconfig)
    assert (ended, out) == (code, "")
    assert all(word in err for word in words), err
    assert "Traceback" not in err


def test_an_unknown_context_and_a_missing_kubeconfig_are_named(quire: Any, api_answers: Any) -> None:
    code, _, err = quire("explain", "chat", "--kubeconfig", api_answers.kubeconfig, "--context", "other")
    assert code == 1 and "no connection to a Kubernetes cluster" in err and "other" in err
    code, _, err = quire("explain", "chat", "--kubeconfig", "nowhere")
    assert code == 1 and "there is no file nowhere" in err


# --- this machine ---


def test_local_run_is_searched_before_any_cluster(
    quire: Any, machine: Any, api_answers: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KUBECONFIG", str(api_answers.kubeconfig))
    machine.run("live.yaml", live=True, chat=served(decisions=log()))
    machine.run("dead.yaml", live=False, time=2000.0, chat=served(), code=served())
    code, out, _ = quire("explain", "chat", "--json")
    assert code == 0 and json.loads(out)["place"].startswith("quire up of live.yaml")
    assert quire("explain", "code")[0] == 1, "a finished run is ignored, and the cluster has no such LLMDeployment"
    code, out, _ = quire("explain", "code", "--local", "--json")
    assert code == 0 and json.loads(out)["ended"].startswith("process died; last update")


def test_name_may_be_omitted_for_a_single_deployment(quire: Any, machine: Any) -> None:
    machine.run("one.yaml", live=True, chat=served())
    assert quire("explain", "--json")[0] == 0
    machine.run("one.yaml", live=True, chat=served(), code=served())
    code, _, err = quire("explain")
    assert code == 1 and "has 2 LLMDeployments; name one chat code" in err


def test_run_is_selected_by_file_and_shows_its_end(quire: Any, machine: Any) -> None:
    machine.run("old.yaml", live=False, ended=1000.0, chat=served(decisions=log()))
    code, out, _ = quire("explain", "--run", "old.yaml")
    assert code == 0 and "ended " in out and "Demand per signal at the last evaluation" in out
    code, _, err = quire("explain", "--run", "other.yaml")
    assert code == 1 and "other.yaml is not running" in err and "known: old.yaml (ended)" in err


def test_unknown_name_is_an_error_with_suggestions(quire: Any, machine: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("quire_cli.inspection.cluster._DEFAULT", Path("no-kubeconfig"))
    machine.run("old.yaml", live=False, chat=served())
    code, _, err = quire("explain", "caht")
    assert code == 1
    assert "no run on this machine serves caht" in err and "did you mean chat?" in err
    assert quire("explain", "chat", "--json")[0] == 0, "a run that is over is better than nothing"


def test_exclusive_location_options_are_refused(quire: Any) -> None:
    code, _, err = quire("explain", "chat", "--local", "-n", "prod")
    assert code == 1 and "use options of one kind only" in err


def test_piped_output_follows_the_run_until_it_ends(quire: Any, machine: Any) -> None:
    machine.run("old.yaml", live=False, ended=1000.0, chat=served(decisions=log()))
    code, out, _ = quire("explain", "chat", "--local", "--watch")
    assert code == 0
    lines = out.splitlines()
    assert len(lines) == 4 and lines[0].endswith("ArrivingWork needs 1.60 replicas")
    assert "the run ended" in lines[-1]
    code, out, _ = quire("explain", "chat", "--local", "--watch", "--json")
    assert code == 0 and json.loads(out)["ended"].startswith("ended ")
