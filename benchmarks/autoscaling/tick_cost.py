"""What one tick of the autoscaler costs the operator: processor time for 1,000 LLMDeployments of three replicas each.

Runs the packaged code over a store filled as the watches fill it. Metrics come in the three ways that there are: given
as samples (the law alone), as pages that replicas would answer (metricsSource: Pods), and as Prometheus's answer to the
two queries. No sockets: what is measured is what quire does with the bytes. Also what a scrape of the operator costs.

    python benchmarks/autoscaling/tick_cost.py [--deployments 1000] [--ticks 8] [--json OUT] [--profile]
"""

import argparse
import asyncio
import cProfile
import json
import platform
import pstats
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

import httpx
from prometheus_client import CollectorRegistry, generate_latest

from quire_operator.adapters.metrics.prometheus import Prometheus
from quire_operator.adapters.metrics.scrape import Scraper
from quire_operator.adapters.metrics.sources import MetricsSources
from quire_operator.app.scaling_telemetry import ScalingTelemetry
from quire_operator.domain.autoscaling.history import ScalingRecord
from quire_operator.domain.autoscaling.observation import Histogram, ReplicaSample
from quire_operator.domain.autoscaling.prometheus_series import PrometheusOptions
from quire_operator.domain.cluster_state.observed import Key, trim_child, trim_pod, trim_resource
from quire_operator.domain.manifests.pod_template import Images
from quire_operator.ports import ReplicaAddress
from quire_operator.reconcile.reconciler import Reconciler
from quire_operator.reconcile.store import Store
from quire_operator.scaling.autoscale import Autoscaler
from quire_operator.scaling.cluster_scaling import ClusterScaling

REPLICAS = 3
TICK_SECONDS = 15.0
WAIT_BOUNDS = (*(0.001 * 2**n for n in range(18)), float("inf"))
# What a replica tells, as the engine names it; the number grows with the tick.
COUNTERS = MappingProxyType(
    {
        'vllm:prompt_tokens_total{engine="0",model_name="m"}': 2000,
        'vllm:generation_tokens_total{engine="0",model_name="m"}': 500,
        'vllm:prefix_cache_hits_total{engine="0",model_name="m"}': 100,
        'vllm:request_success_total{engine="0",finished_reason="stop",model_name="m"}': 9,
        'vllm:request_success_total{engine="0",finished_reason="length",model_name="m"}': 1,
        'quire_steps_total{engine="0",model_name="m"}': 200,
        'quire_step_seconds_total{engine="0",model_name="m",part="run"}': 3,
        'quire_step_seconds_total{engine="0",model_name="m",part="sample"}': 0.1,
        'quire_arrived_requests_total{engine="0",model_name="m"}': 10,
        'quire_uncached_prompt_tokens_total{engine="0",model_name="m"}': 1900,
        **{
            f'quire_first_token_wait_seconds_bucket{{engine="0",le="{bound:g}",model_name="m"}}': min(10, number)
            for number, bound in enumerate(WAIT_BOUNDS)
        },
    }
)
GAUGES = MappingProxyType(
    {
        'vllm:num_requests_running{engine="0",model_name="m"}': 3,
        'vllm:num_requests_waiting{engine="0",model_name="m"}': 0,
        'vllm:kv_cache_usage_perc{engine="0",model_name="m"}': 0.1,
        'vllm:cache_config_info{block_size="16",engine="0",model_name="m",num_gpu_blocks="1000"}': 1,
        'quire_queued_tokens{engine="0",model_name="m"}': 0,
    }
)


class SetClock:
    def __init__(self) -> None:
        self.time = 1_000_000.0

    def now(self) -> float:
        return self.time


class GivenSamples:
    """``ports.Metrics`` without any reading: the law alone."""

    def __init__(self, clock: SetClock) -> None:
        self._clock, self._tick = clock, 0

    async def samples(self, replicas: Sequence[ReplicaAddress]) -> Mapping[str, ReplicaSample]:
        self._tick += 1
        k = float(self._tick)
        waits = Histogram(bounds=WAIT_BOUNDS, counts=tuple(k * min(10, n) for n in range(len(WAIT_BOUNDS))))
        return {
            replica.name: ReplicaSample(
                time=self._clock.now(),
                waiting=0,
                running=3,
                queued_prompt_tokens=0,
                kv_tokens_used=1600,
                kv_tokens_capacity=16_000,
                arrived_requests=10 * k,
                arrived_prompt_tokens=1900 * k,
                prompt_tokens=2000 * k,
                cached_prompt_tokens=100 * k,
                generation_tokens=500 * k,
                finished_requests=10 * k,
                steps=200 * k,
                busy_seconds=3.1 * k,
                first_token_waits=waits,
            )
            for replica in replicas
        }

    async def gateway_requests(self) -> None:
        return None

    async def aclose(self) -> None:
        """Nothing is open."""


def page(tick: int, model: str) -> bytes:
    """What a replica answers at /metrics: what is read of it, among as much that is not."""
    lines = [f"{name} {value * tick}" for name, value in COUNTERS.items()]
    lines += [f"{name} {value}" for name, value in GAUGES.items()]
    lines += [f'vllm:e2e_request_latency_seconds_bucket{{engine="0",le="{n}",model_name="m"}} {n}' for n in range(120)]
    return ("\n".join(lines) + "\n").replace('model_name="m"', f'model_name="{model}"').encode()


def scraped(clock: SetClock, models: Mapping[str, str]) -> MetricsSources:
    """Pages of the models at these addresses, written once a tick outside of what is measured."""
    pages: dict[str, bytes] = {}

    async def read(url: str) -> bytes:
        return pages[models[url]]

    def write() -> None:
        tick = 1 + int((clock.now() - 1_000_000) / TICK_SECONDS)
        pages.update({model: page(tick, model) for model in models.values()})

    sources = MetricsSources(pods=Scraper(clock=clock, read=read), prometheus=None)
    sources.prepare = write  # type: ignore[attr-defined]
    return sources


def queried(clock: SetClock, names: Sequence[str]) -> MetricsSources:
    """Prometheus's answers, written once a tick outside of what is measured."""
    series = [(*_parsed(name), value, True) for name, value in COUNTERS.items()]
    series += [(*_parsed(name), value, False) for name, value in GAUGES.items()]
    answers: dict[float, tuple[bytes, bytes]] = {}

    def write(now: float) -> tuple[bytes, bytes]:
        tick = 1 + int((now - 1_000_000) / TICK_SECONDS)
        figures, times = [], []
        for full in names:
            namespace, _, pod = full.partition("/")
            who = {"namespace": namespace, "pod": pod}
            times.append({"metric": who, "value": [now, str(now - 5)]})
            for name, labels, value, grows in series:
                shown = str(value * tick if grows else value)
                figures.append({"metric": {"__name__": name, **labels, **who}, "value": [now, shown]})
        return _vector(figures), _vector(times)

    def answer(request: httpx.Request) -> httpx.Response:
        figures, times = answers[clock.now()]
        return httpx.Response(200, content=times if b"timestamp" in request.content else figures)

    client = httpx.AsyncClient(transport=httpx.MockTransport(answer))
    prometheus = Prometheus(PrometheusOptions(url="http://prometheus"), clock=clock, client=client)
    sources = MetricsSources(pods=Scraper(clock=clock), prometheus=prometheus)
    sources.prepare = lambda: answers.update({clock.now(): write(clock.now())})  # type: ignore[attr-defined]
    return sources


def _vector(elements: Sequence[object]) -> bytes:
    return json.dumps({"status": "success", "data": {"resultType": "vector", "result": elements}}).encode()


def _parsed(name: str) -> tuple[str, dict[str, str]]:
    metric, _, rest = name.partition("{")
    pairs = (part.split("=", 1) for part in rest.rstrip("}").split('",'))
    return metric, {key: value.strip('"') for key, value in pairs}


class NoCluster:
    """Nothing is written: the load is steady."""

    def __getattr__(self, name: str) -> Any:
        raise AssertionError(f"a quiet tick wrote: {name}")


class Persisted(ClusterScaling):
    """Records that would be written are only counted."""

    writes = 0

    async def persist(self, key: str, record: ScalingRecord) -> None:
        self.writes += 1


def filled_store(count: int) -> Store:
    store = Store()
    for number in range(count):
        key = Key(f"team-{number % 20}", f"model-{number}")
        store.put_resource(trim_resource(_resource(key)))
        store.put_child(key, trim_child(_deployment(key), kind="Deployment"))
        for replica in range(REPLICAS):
            store.put_pod(key, trim_pod(_pod(key, replica)))
    return store


def _resource(key: Key) -> dict[str, Any]:
    autoscaling = {"minReplicas": 1, "maxReplicas": 8, "targets": {"queueDepth": 4}}
    change = {
        "time": "2026-01-01T00:00:00.000Z",
        "from": 2,
        "to": 3,
        "reason": "ArrivingWork",
        "message": "2 → 3: ArrivingWork needs 2.40 replicas",
        "inputs": {f"input{n}": "1.5" for n in range(14)},
    }
    return {
        "apiVersion": "quire.dev/v1alpha1",
        "kind": "LLMDeployment",
        "metadata": _metadata(key, key.name),
        "spec": {"model": {"source": "file:///models/m", "servedName": "m"}, "autoscaling": autoscaling},
        "status": {"autoscaling": {"desiredReplicas": 3, "lastDecision": change, "history": [change] * 10}},
    }


def _deployment(key: Key) -> dict[str, Any]:
    counts = {"replicas": 3, "updatedReplicas": 3, "readyReplicas": 3, "availableReplicas": 3, "observedGeneration": 1}
    owner = {"kind": "LLMDeployment", "name": key.name, "uid": f"{key}/{key.name}", "controller": True}
    metadata = _metadata(key, key.name) | {"ownerReferences": [owner]}
    return {"metadata": metadata, "spec": {"replicas": 3}, "status": counts}


def _pod(key: Key, number: int) -> dict[str, Any]:
    name = f"{key.name}-{number}"
    ready = [{"type": "Ready", "status": "True"}]
    status = {"phase": "Running", "podIP": _address(key, number), "conditions": ready}
    return {"metadata": _metadata(key, name), "status": status}


def _address(key: Key, number: int) -> str:
    model = int(key.name.rpartition("-")[2])
    return f"10.{model // 256}.{model % 256}.{1 + number}"


def _metadata(key: Key, name: str) -> dict[str, Any]:
    return {"namespace": key.namespace, "name": name, "uid": f"{key}/{name}", "resourceVersion": "1", "generation": 1}


def timed(work: Callable[[], Any]) -> tuple[float, Any]:
    started = time.process_time()
    result = work()
    return time.process_time() - started, result


async def measure(way: str, store: Store, ticks: int, profile: cProfile.Profile | None) -> dict[str, float]:
    clock = SetClock()
    reconciler = Reconciler(
        cluster=NoCluster(),  # type: ignore[arg-type]
        store=store,
        clock=clock,
        images=Images(engine="e"),
        enqueue=lambda key: None,
    )
    problem = (lambda: None) if way == "prometheus" else None
    scaling = Persisted(store=store, reconciler=reconciler, prometheus_problem=problem)
    replicas = [replica for subject in scaling.subjects() for replica in subject.replicas]
    names = [replica.name for replica in replicas]
    models = {str(replica.metrics_url): replica.name.rpartition("-")[0] for replica in replicas}
    metrics: Any = {
        "given": lambda: GivenSamples(clock),
        "pods": lambda: scraped(clock, models),
        "prometheus": lambda: queried(clock, names),
    }[way]()
    autoscaler = Autoscaler(metrics=metrics, target=scaling, clock=clock)
    telemetry = ScalingTelemetry(registry := CollectorRegistry())
    telemetry.show(lambda: scaling.latest, last_answer=None, gateways=lambda: None)
    spent: list[float] = []
    for _ in range(ticks):
        clock.time += TICK_SECONDS
        getattr(metrics, "prepare", lambda: None)()
        if profile is not None:
            profile.enable()
        started = time.process_time()
        scaling.note(await autoscaler.tick(scaling.subjects()))
        spent.append(time.process_time() - started)
        if profile is not None:
            profile.disable()
    wake, _ = timed(scaling.sleeping)
    scrape, text = timed(lambda: generate_latest(registry))
    await metrics.aclose()
    return {
        "tick_cpu_seconds_median": round(statistics.median(spent[1:]), 4),
        "first_tick_cpu_seconds": round(spent[0], 4),
        "wake_look_cpu_seconds": round(wake, 5),
        "operator_scrape_cpu_seconds": round(scrape, 4),
        "operator_scrape_bytes": len(text),
        "records_persisted": scaling.writes,
    }


def rows(arguments: argparse.Namespace) -> Iterator[tuple[str, dict[str, float]]]:
    for way in arguments.ways:
        profile = cProfile.Profile() if arguments.profile else None
        found = asyncio.run(measure(way, filled_store(arguments.deployments), arguments.ticks, profile))
        yield way, found
        if profile is not None:
            pstats.Stats(profile, stream=sys.stderr).sort_stats("tottime").print_stats(25)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--deployments", type=int, default=1000)
    parser.add_argument("--ticks", type=int, default=8)
    parser.add_argument("--ways", nargs="+", default=["given", "pods", "prometheus"])
    parser.add_argument("--json", type=Path)
    parser.add_argument("--profile", action="store_true")
    arguments = parser.parse_args()
    found = {}
    for way, row in rows(arguments):
        found[way] = row
        print(f"{way:>11}: {row['tick_cpu_seconds_median'] * 1e3:6.0f} ms of CPU a tick", row)
    if arguments.json is not None:
        about = {"deployments": arguments.deployments, "replicas": REPLICAS, "python": platform.python_version()}
        arguments.json.write_text(json.dumps({"about": about, "rows": found}, indent=1))


if __name__ == "__main__":
    main()
