"""A real Prometheus that labels series as the Prometheus operator does for our PodMonitor.

Debian's Prometheus has no discovery of pods, so its result is read from the real API server here. The rest follows from
the PodMonitor's selector, endpoints and podTargetLabels.
"""

import asyncio
import json
import subprocess
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml
from aiohttp import web
from kube_support.operators import Namespace, OperatorProcess
from specs import valid_spec

from quire_cluster.ports import free_ports
from quire_common.contract import engine as engine_names
from quire_operator.autoscaling.engine_metrics import PrometheusOptions
from quire_operator.autoscaling.observation import ReplicaAddress, ReplicaPhase
from quire_operator.autoscaling.prometheus import Prometheus
from quire_operator.deployment import network
from quire_operator.deployment.manifests import Monitoring, all_tracks

POD_IP = "127.9.8.7"
PAGE = """\
vllm:num_requests_running{engine="0",model_name="m"} 3
vllm:num_requests_waiting{engine="0",model_name="m"} 2
vllm:kv_cache_usage_perc{engine="0"} 0.5
vllm:cache_config_info{engine="0",block_size="16",num_gpu_blocks="100"} 1
"""


def sanitized(label: str) -> str:
    return "".join(c if c.isalnum() else "_" for c in label)


def discovered(pod: dict[str, Any], served_at: int) -> dict[str, Any]:
    """Return the discovery's labels of a pod's first port, with a port that is free on this machine."""
    container = pod["spec"]["containers"][0]
    (port,) = container["ports"]
    labels = {f"label_{sanitized(name)}": value for name, value in pod["metadata"]["labels"].items()}
    meta = {"name": pod["metadata"]["name"], "container_name": container["name"], "container_port_name": port["name"]}
    found = {f"__meta_kubernetes_pod_{name}": value for name, value in (meta | labels).items()}
    found["__meta_kubernetes_namespace"] = pod["metadata"]["namespace"]
    return {"targets": [f"{pod['status']['podIP']}:{served_at}"], "labels": found}


def scrape_config(monitor: dict[str, Any], target: dict[str, Any]) -> dict[str, Any]:
    (endpoint,) = monitor["podMetricsEndpoints"]
    pod = "__meta_kubernetes_pod_"
    selector = monitor["selector"]
    wanted = {f"{pod}label_{sanitized(label)}": value for label, value in selector["matchLabels"].items()}
    for one in selector["matchExpressions"]:
        assert one["operator"] == "In"
        wanted[f"{pod}label_{sanitized(one['key'])}"] = "|".join(one["values"])
    wanted[f"{pod}container_port_name"] = endpoint["port"]
    named = {"namespace": "__meta_kubernetes_namespace", "pod": f"{pod}name", "container": f"{pod}container_name"}
    named |= {sanitized(label): f"{pod}label_{sanitized(label)}" for label in monitor["podTargetLabels"]}
    return {
        "job_name": "pod-monitor",
        "metrics_path": endpoint["path"],
        "scrape_interval": "200ms",
        "scrape_timeout": "200ms",
        "static_configs": [target],
        "relabel_configs": [
            *({"action": "keep", "source_labels": [label], "regex": value} for label, value in wanted.items()),
            *({"source_labels": [source], "target_label": target} for target, source in named.items()),
        ],
    }


@pytest.fixture
def replica(shared_space: Namespace, operator: OperatorProcess) -> dict[str, Any]:
    """Return a pod whose status has an address of this machine."""
    shared_space.apply("scraped", replicas=1)
    shared_space.wait_settled("scraped")
    (pod,) = (p for p in shared_space.items("pods") if p["metadata"]["name"].startswith("scraped-"))
    running = {"phase": "Running", "podIP": POD_IP, "podIPs": [{"ip": POD_IP}]}
    return shared_space.patch("pods", f"{pod['metadata']['name']}/status", {"status": running})


@pytest.fixture
def page_port() -> int:
    (port,) = free_ports(1)
    return port


@pytest.fixture
def prometheus(
    prometheus_programs: Mapping[str, Path], replica: dict[str, Any], page_port: int, tmp_path: Path
) -> Iterator[str]:
    """Yield its address."""
    monitor: Any = network.pod_monitor(Monitoring(), selector=all_tracks("scraped"))
    config = tmp_path / "prometheus.yml"
    config.write_text(yaml.safe_dump({"scrape_configs": [scrape_config(monitor, discovered(replica, page_port))]}))
    (port,) = free_ports(1)
    argv = [prometheus_programs["prometheus"], f"--config.file={config}", f"--storage.tsdb.path={tmp_path / 'data'}"]
    with (tmp_path / "log").open("w") as log:
        process = subprocess.Popen([*argv, f"--web.listen-address=127.0.0.1:{port}"], stdout=log, stderr=log)
    yield f"http://127.0.0.1:{port}"
    process.kill()
    process.wait()


async def query(url: str, expression: str) -> list[dict[str, Any]]:
    async with httpx.AsyncClient(trust_env=False) as client:
        try:
            answer = await client.get(f"{url}/api/v1/query", params={"query": expression})
        except httpx.TransportError:
            return []  # it is starting
    if answer.status_code != 200:
        return []
    result: list[dict[str, Any]] = answer.json()["data"]["result"]
    return result


async def test_series_have_the_names_that_are_queried(
    shared_space: Namespace, replica: dict[str, Any], page_port: int, prometheus: str
) -> None:
    async def page(request: web.Request) -> web.Response:
        return web.Response(text=PAGE)

    app = web.Application()
    app.router.add_get(engine_names.METRICS_PATH, page)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, POD_IP, page_port).start()
    try:
        async with asyncio.timeout(120):
            while not (found := await query(prometheus, "vllm:num_requests_running")):
                await asyncio.sleep(0.1)
        (series,) = found
        pod = replica["metadata"]["name"]
        names = {"namespace": shared_space.name, "pod": pod, network.SERIES_LABEL: "scraped"}
        assert names.items() <= series["metric"].items(), json.dumps(series)

        url = f"http://{POD_IP}:{page_port}{engine_names.METRICS_PATH}"
        address = ReplicaAddress(
            name=f"{shared_space.name}/{pod}", phase=ReplicaPhase.READY, metrics_url=url, by_prometheus=True
        )
        adapter = Prometheus(PrometheusOptions(url=prometheus), clock=time.time)
        sample = (await adapter.samples([address]))[address.name]
        await adapter.aclose()
        assert (sample.running, sample.waiting, sample.kv_tokens_capacity) == (3, 2, 1600)

        (firing,) = await query(prometheus, full(shared_space.name, most=1))
        assert firing["value"][1] == "2", "two requests have been waiting"
        assert await query(prometheus, full(shared_space.name, most=2)) == []
    finally:
        await runner.cleanup()


def full(namespace: str, *, most: int) -> str:
    """Return the expression of QuireAtMaxReplicas."""
    spec = valid_spec(name="scraped", namespace=namespace, autoscaling={"maxReplicas": most})
    rule: Any = network.prometheus_rule(spec, Monitoring())
    expressions = {entry["alert"]: entry["expr"] for entry in rule["groups"][0]["rules"]}
    return str(expressions["QuireAtMaxReplicas"])
