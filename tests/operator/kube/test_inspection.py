"""``quire explain`` and ``quire top`` on a real API server and operator, with all and few permissions."""

import json
import socket
import urllib.request
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from kube_support.operators import Namespace, OperatorProcess, until
from page_server import page_server
from run_quire import run_quire

from quire_common.contract import engine

Quire = Callable[..., tuple[int, str, str]]

PAGE = """\
vllm:num_requests_running 4
vllm:num_requests_waiting 40
vllm:kv_cache_usage_perc 0.5
vllm:cache_config_info{block_size="16",num_gpu_blocks="100"} 1
vllm:generation_tokens_total 700
"""
OPERATOR_PORT = 8080


def own_address() -> str:
    """Return this machine's address, because the API server does not proxy to loopback. Nothing is sent."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))
        except OSError:
            pytest.skip("this machine has no address but loopback, to which no API server proxies")
        address: str = probe.getsockname()[0]
        return address


@pytest.fixture
def quire(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Quire:
    """Return a function that runs the command without local runs and returns exit code, output and errors."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.delenv("KUBECONFIG", raising=False)

    return partial(run_quire, capfd)


def running(address: str, container: str) -> dict[str, Any]:
    """Return a pod's status as a kubelet would write it; the cluster has no kubelet."""
    state = {"name": container, "ready": True, "restartCount": 0, "image": "x", "imageID": "", "state": {"running": {}}}
    conditions = [{"type": kind, "status": "True"} for kind in ("Ready", "ContainersReady")]
    return {"phase": "Running", "podIP": address, "containerStatuses": [state], "conditions": conditions}


def operator_port(operator: OperatorProcess) -> int:
    told = [line["message"] for line in operator.lines() if "on port" in str(line.get("message"))]
    return int(told[0].partition("on port ")[2].partition(",")[0])


@pytest.fixture
def address(operator: OperatorProcess) -> Iterator[str]:
    """Yield this machine's address, at which an engine and the operator answer in place of pods."""
    port, found = operator_port(operator), own_address()

    def relay(path: str) -> tuple[int, str]:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}") as answer:
            return 200, answer.read().decode()

    with (
        page_server(lambda _: (200, PAGE), address=found, port=engine.HTTP_PORT),
        page_server(relay, address=found, port=OPERATOR_PORT),
    ):
        yield found


def test_a_decision_is_explained_and_its_figures_shown(
    shared_space: Namespace, operator: OperatorProcess, address: str, quire: Quire
) -> None:
    limits = {"minReplicas": 1, "maxReplicas": 2, "targets": {"queueDepth": 4}}
    shared_space.apply("explained", replicas=1, autoscaling=limits)
    shared_space.wait_settled("explained")
    (pod,) = (
        item["metadata"]["name"] for item in shared_space.items("pods") if "explained-" in item["metadata"]["name"]
    )
    shared_space.patch("pods", f"{pod}/status", {"status": running(address, "engine")})
    labels = {"app.kubernetes.io/name": "quire", "app.kubernetes.io/component": "operator"}
    container = {"name": "operator", "image": "x"}
    shared_space.create("pods", {"metadata": {"name": "op", "labels": labels}, "spec": {"containers": [container]}})
    shared_space.patch("pods", "op/status", {"status": running(address, "operator")})

    where = ("-n", shared_space.name, "--kubeconfig", shared_space.server.admin_kubeconfig)

    def explained() -> dict[str, Any]:
        code, out, err = quire("explain", "explained", "--json", *where)
        assert code == 0, err
        told: dict[str, Any] = json.loads(out)
        return told

    told = until(
        lambda: (
            (found := explained())["history"]
            and found["history"][-1]["last"]["to"] == found["replicas"]["asked"] == 2
            and found
        )
    )
    assert told["now"]["terms"][0]["reason"] == "QueueDepth"
    assert told["now"]["metrics"]["source"] == "Pods" and told["nowMissing"] is None
    assert told["autoscaling"]["maxReplicas"] == 2
    code, out, _ = quire("explain", "explained", *where)
    assert code == 0 and "▸ QueueDepth" in out and "40 waiting over queueDepth 4" in out

    code, out, err = quire("top", "explained", "--once", "--interval", "200ms", "--json", *where)
    assert code == 0, err
    (load,) = json.loads(out)["deployments"]
    assert (load["figures"]["waiting"], load["figures"]["kvPercent"], load["answering"]) == (40.0, 50.0, 1)
    assert load["figures"]["generationTokensPerSecond"] == 0.0
    assert "no first token" not in json.dumps(load["figures"]["missing"]), "it exports none"
    assert {replica["silence"] for replica in load["replicas"]} == {None, "it is pending"}
