"""``quire top`` for users: a table that fits, dashes with their reasons, and the sources of the figures."""

import json
import math
from collections.abc import Iterator
from typing import Any

import pytest
from page_server import page_server
from rich.console import Console

from quire_cli.inspection.load import (
    CACHE_QUERIES,
    PREEMPTIONS,
    Deployment,
    Fleet,
    FleetLoad,
    Loads,
    Reading,
    Replica,
    Sort,
)
from quire_cli.inspection.top import _poll, notes, render
from quire_cli.local.state import ReplicaState, ServedState
from quire_common.contract import engine as m
from quire_operator.autoscaling.observation import Histogram
from quire_operator.kube.errors import ClusterError

PODS = "/api/v1/namespaces/prod/pods"
RESOURCES = "/apis/quire.dev/v1alpha1/namespaces/prod/llmdeployments"
PAGE = """\
vllm:num_requests_running{engine="0"} 3
vllm:num_requests_waiting{engine="0"} 7
vllm:kv_cache_usage_perc{engine="0"} 0.5
vllm:generation_tokens_total{engine="0"} 100
"""


def reading(time: float, *, busy: float) -> Reading:
    values = {
        m.WAITING: 1015 * busy,
        m.RUNNING: 256.0,
        m.KV_USAGE: 0.876,
        m.PROMPT_TOKENS: 30_000 * time,
        m.GENERATION_TOKENS: 12_000 * time,
        m.CACHE_HITS: 25 * time,
        CACHE_QUERIES: 100 * time,
        PREEMPTIONS: 0.9 * time,
    }
    return Reading(
        time=time,
        values=values,
        first_tokens=Histogram(bounds=(0.1, 1.0, math.inf), counts=(time, 9 * time, 9 * time)),
    )


def load(deployments: int = 2, replicas: int = 3) -> FleetLoad:
    """Return replicas with long names and large figures, of which one does not answer and one loads."""
    loads = Loads(seconds=10.0)

    def look(time: float) -> FleetLoad:
        return loads.update(
            Fleet(
                place="context gpu-cluster, all namespaces",
                how="scraped through the API server (pods/proxy)",
                deployments=tuple(deployment(number, time) for number in range(deployments)),
            ),
            sort=Sort.queue,
        )

    def deployment(number: int, time: float) -> Deployment:
        name = f"chat-llama-{number}"
        members = [
            Replica(id=f"{name}{i}", name=f"{name}-7d9f8c6b5-x{i}kq", phase="Ready", reading=reading(time, busy=number))
            for i in range(replicas)
        ]
        silent = Replica(id=f"{name}s", name=f"{name}-silent", phase="Ready", silence="no answer within 4 s")
        loading = Replica(id=f"{name}l", name=f"{name}-new", phase="Loading", silence="it is loading")
        return Deployment(
            namespace="production",
            name=name,
            asked=replicas + 2,
            ready=replicas + 1,
            replicas=(*members, silent, loading),
        )

    look(100.0)
    return look(102.0)


def drawn(found: FleetLoad, width: int, *, expand: bool = False, most_rows: int | None = None) -> str:
    console = Console(width=width, highlight=False)
    with console.capture() as capture:
        console.print(render(found, width=width, expand=expand, most_rows=most_rows))
    return capture.get()


@pytest.mark.parametrize("width", [80, 140])
def test_table_fits_the_width_without_cutting_values(width: int) -> None:
    lines = drawn(load(), width, expand=True).splitlines()
    assert max(map(len, lines)) <= width
    busy = next(line for line in lines if "chat-llama-1" in line)
    assert busy.split()[1:] == ["4/5", "3,045", "768", "88%", "90,000", "36,000", "494ms", "949ms", "25%", "2.7"]
    assert any("x0kq" in line for line in lines), "of a long name the end is kept"
    assert any(line.split()[1:] == ["Loading", *9 * "–"] for line in lines if "-new" in line)


def test_notes_explain_missing_values() -> None:
    assert notes(load(1)) == ["chat-llama-0-new: it is loading", "chat-llama-0-silent: no answer within 4 s"]
    one_look = Loads(seconds=1.0).update(
        Fleet(
            place="",
            how="",
            deployments=(
                Deployment(
                    namespace=None,
                    name="a",
                    asked=1,
                    ready=1,
                    replicas=(Replica(id="a", name="a", phase="Ready", reading=reading(1.0, busy=0)),),
                ),
            ),
        ),
        sort=Sort.name,
    )
    assert notes(one_look) == ["– TTFT, gen tok/s, hits, preempt/s, prompt tok/s: rates need a second poll"]
    assert notes(load(30))[0] == "chat-llama-29-new, chat-llama-28-new, chat-llama-27-new and 27 more: it is loading"


def test_three_hundred_replicas_fit_one_screen() -> None:
    many = load(10, 30)
    assert sum("chat-llama" in line for line in drawn(many, 100).splitlines() if "production" in line) == 10
    short = drawn(many, 100, expand=True, most_rows=5)
    assert "… and 325 more rows" in short and len(short.splitlines()) < 15


def test_no_deployments_message_is_shown() -> None:
    nobody = Loads(seconds=1.0).update(Fleet(place="here", how="asked", deployments=()), sort=Sort.queue)
    assert "no LLMDeployments" in drawn(nobody, 80)


@pytest.fixture
def engine() -> Iterator[str]:
    """Yield the address of an engine's metrics."""
    with page_server(lambda _: (200, PAGE)) as url:
        yield url


def test_replicas_of_a_local_run_are_polled_directly(quire: Any, machine: Any, engine: str) -> None:
    states = (
        ReplicaState(name="chat-0", phase="Ready", url=engine),
        ReplicaState(name="chat-1", phase="Ready", url="http://127.0.0.1:1"),
        ReplicaState(name="chat-2", phase="Failed", reason="signal 9"),
    )
    served = ServedState(served_name="chat", replicas=3, ready_replicas=2, replica_states=states)
    machine.run("f.yaml", live=True, chat=served)
    code, out, _ = quire("top", "--once", "--interval", "200ms", "--json")
    assert code == 0
    told = json.loads(out)
    (chat,) = told["deployments"]
    assert told["how"] == "scraped directly" and told["note"] is None
    assert (chat["figures"]["waiting"], chat["figures"]["running"], chat["answering"]) == (7.0, 3.0, 1)
    silences = {replica["name"]: replica["silence"] for replica in chat["replicas"]}
    assert silences["chat-0"] is None and silences["chat-2"] == "it is failed"
    assert silences["chat-1"].startswith("no answer: ")
    code, out, _ = quire("top", "--once", "--interval", "200ms", "--replicas")
    assert code == 0 and "2/3" in out and "chat-1" in out


def test_ended_run_is_shown_as_ended(quire: Any, machine: Any) -> None:
    machine.run("f.yaml", live=False, ended=1000.0, chat=ServedState(served_name="c", replicas=0, ready_replicas=0))
    code, out, _ = quire("top", "--local", "--once", "--interval", "200ms")
    assert code == 0 and "this run ended" in out


async def test_failed_second_poll_is_a_note() -> None:
    class Source:
        polls = 0

        async def poll(self, now: float) -> Fleet:
            self.polls += 1
            if self.polls > 1:
                raise ClusterError("etcd is away")
            return Fleet(place="here", how="asked", deployments=())

        async def close(self) -> None: ...

    shown: list[FleetLoad] = []
    await _poll(Source(), Loads(seconds=1.0), 0.0, Sort.name, shown.append, once=True)
    assert [load.note for load in shown] == ["the API server: etcd is away"]


def cluster(**replicas: tuple[int, Any]) -> dict[str, tuple[int, Any]]:
    """Return the API server's answers for an LLMDeployment with a ready pod for each page."""
    metadata = {"name": "chat", "namespace": "prod"}
    spec = {"model": {"source": "file:///m"}}
    pods = [
        {
            "metadata": {"name": name, "namespace": "prod", "labels": {"quire.dev/llmdeployment": "chat"}},
            "status": {"phase": "Running", "podIP": "10.0.0.1", "conditions": [{"type": "Ready", "status": "True"}]},
        }
        for name in replicas
    ]
    status = {"desiredReplicas": len(pods)}
    resource = {"kind": "LLMDeployment", "metadata": metadata, "spec": spec, "status": status}
    pages = {f"{PODS}/{name}:8000/proxy/metrics": answer for name, answer in replicas.items()}
    return {RESOURCES: (200, {"items": [resource]}), PODS: (200, {"items": pods}), **pages}


def test_pods_are_polled_through_the_api_server_proxy(quire: Any, api_answers: Any) -> None:
    denied = 'pods "b" is forbidden: User "u" cannot get resource "pods/proxy" in API group "" in the namespace "prod"'
    away = "error trying to reach service: dial tcp 10.0.0.1:8000: connect: connection refused"
    kept_out = "error trying to reach service: dial tcp 10.0.0.1:8000: i/o timeout"
    api_answers.answers = cluster(
        a=(200, PAGE),
        b=(403, {"message": denied}),
        c=(503, {"message": away}),
        d=(200, "<html>"),
        e=(503, {"message": kept_out}),
    )
    code, out, _ = quire("top", "--kubeconfig", api_answers.kubeconfig, "--once", "--interval", "200ms", "--json")
    assert code == 0
    (chat,) = json.loads(out)["deployments"]
    assert (chat["ready"], chat["asked"], chat["answering"], chat["figures"]["waiting"]) == (5, 5, 1, 7.0)
    assert {replica["name"]: replica["silence"] for replica in chat["replicas"]} == {
        "a": None,
        "b": "you are not allowed to get pods/proxy in namespace prod",
        "c": away,
        "d": "its answer is not the metrics page of an engine",
        "e": f"{kept_out}; if a NetworkPolicy blocks the API server, use --prometheus-url",
    }


@pytest.mark.parametrize(
    ("answers", "words"),
    [
        ({}, "this cluster has no kind LLMDeployment"),
        (
            cluster(a=(200, PAGE)),
            "there is no LLMDeployment caht in namespace prod of context gpu-cluster did you mean",
        ),
        (
            {
                RESOURCES: (
                    403,
                    {
                        "message": 'User "u" cannot list resource "llmdeployments" in API group "quire.dev" in the '
                        'namespace "prod"'
                    },
                )
            },
            "you are not allowed to list llmdeployments.quire.dev in namespace prod",
        ),
    ],
)
def test_cluster_errors_of_top_fit_one_screen(
    quire: Any, api_answers: Any, answers: dict[str, Any], words: str
) -> None:
    api_answers.answers = answers
    code, out, err = quire("top", "caht", "--kubeconfig", api_answers.kubeconfig)
    assert (code, out) == (1, "")
    assert words in err and "Traceback" not in err


@pytest.mark.parametrize("interval", ["0s", "soon", "100ms"])
def test_an_interval_too_short_is_refused(quire: Any, machine: Any, interval: str) -> None:
    code, _, err = quire("top", "--interval", interval)
    assert code == 2 and "is not a duration of at least 200ms" in err.replace("│ ", "")
