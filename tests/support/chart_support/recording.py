"""Ten minutes of a small cluster, as Prometheus would have scraped it: the pages are those of the real exporters.

A model with two replicas and a third that starts, a gateway, and a leading operator. The load is steady, so that the
values of a panel can be computed by hand. Two jobs scrape each pod, as with a PodMonitor and annotations together: it
must count once. Nothing waits: only the time stamps are ten minutes apart.
"""

import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from datetime import UTC, datetime

from prometheus_client import generate_latest
from prometheus_client.parser import text_string_to_metric_families

from quire_common.contract.gateway import Endpoint, ModelEndpoints
from quire_engine.api.metrics import Exposition, RequestTimes
from quire_engine.api.metrics import Metrics as EngineMetrics
from quire_engine.config import CacheOptions
from quire_engine.core.stats import Counters, Gauges, StepSeconds
from quire_engine.ipc.messages import Ready, Stats
from quire_gateway.bodies import BodyMemory
from quire_gateway.fleet import Fleet
from quire_gateway.metrics import Metrics as GatewayMetrics
from quire_operator.app.resource_metrics import ResourceMetrics
from quire_operator.app.telemetry import Telemetry
from quire_operator.autoscaling.decide import Decision
from quire_operator.autoscaling.demand import Reason, Term
from quire_operator.autoscaling.history import History
from quire_operator.deployment.store import Store
from quire_operator.kube.objects import Key
from quire_operator.kube.trimming import trim_child, trim_pod, trim_resource

START, STEP, STEPS = 1_800_000_000, 15, 41
END = START + STEP * (STEPS - 1)
NAMESPACE, MODEL, OPERATOR_NAMESPACE = "prod", "org/chat", "quire-system"
NAME = "chat"
TOKENS_PER_SECOND, REQUESTS_PER_SECOND = 100, 1
"""The rates of each of the two replicas."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """The pod labels that a scrape adds to a page. Those of the page have priority if the monitor honours them."""

    labels: Mapping[str, str]
    honours_labels: bool = False


class Engine:
    """A replica."""

    def __init__(self, pod: str) -> None:
        self.target = Target(labels={"namespace": NAMESPACE, "pod": pod, "quire_dev_llmdeployment": NAME})
        self._metrics = EngineMetrics(MODEL, 4096)
        self._page = Exposition(self._metrics, CacheOptions(), lambda: 1.0, most_drafts=2)
        self._metrics.engine_ready(
            Ready(
                pid=1,
                model_bytes=1,
                kv_cache_bytes=1,
                num_blocks=100,
                block_size=16,
                max_model_len=4096,
                dtype="float32",
                weights="float32",
                phase_seconds={"weights": 1.0},
            )
        )

    def page(self, seconds: int) -> str:
        """Return the page after these seconds: half of the blocks used, a fifth with prefixes, half of prompts hit."""
        self._metrics.engine_stats(
            Stats(
                time=1.0,
                last_step_time=1.0,
                gauges=Gauges(
                    num_running=8,
                    num_waiting=3,
                    queued_tokens=120,
                    parked_tokens=0,
                    prefilling_tokens=0,
                    blocks_total=100,
                    blocks_used=50,
                    blocks_cached=20,
                    kv_usage=0.5,
                    kv_slots_wasted=4,
                    swap_blocks_total=0,
                    swap_blocks_used=0,
                ),
                counters=Counters(
                    steps=20 * seconds,
                    prompt_tokens=2 * TOKENS_PER_SECOND * seconds,
                    generation_tokens=TOKENS_PER_SECOND * seconds,
                    scheduled_tokens=300 * seconds,
                    prefix_cache_queries=100 * seconds,
                    prefix_cache_hits=50 * seconds,
                    num_drafts=seconds,
                    draft_tokens=2 * seconds,
                    accepted_tokens=seconds,
                    accepted_by_position=[seconds, 0],
                    undrafted_sequences={"cost": 4 * seconds},
                    preemptions={"recompute:cheaper": seconds // 60, "swap:cheaper": seconds // 120},
                ),
                seconds=StepSeconds(run=0.4 * seconds, sample=0.1 * seconds),
            )
        )
        for _ in range(STEP * REQUESTS_PER_SECOND):
            self._request()
        self._metrics.rejected["queue_full"] += 1
        return self._page.text().decode()

    def _request(self) -> None:
        self._metrics.arrived(prompt_tokens=200)
        times = RequestTimes(arrived=0.0, first_scheduled=0.1)
        self._metrics.first_token(times, 0.3)
        self._metrics.next_tokens(times, 99, 0.3 + 99 * 0.02)
        self._metrics.request_finished(times, "stop", prompt_tokens=200, tokens=100, now=2.3)


class Gateway:
    target = Target(labels={"namespace": OPERATOR_NAMESPACE, "pod": "gateway-0"})

    def __init__(self) -> None:
        fleet = Fleet()
        self._metrics = GatewayMetrics(fleet, BodyMemory(0))
        endpoint = Endpoint(id="chat-0", url="http://192.0.2.1", ready=True, serving=True, terminating=False)
        endpoints = (endpoint, replace(endpoint, id="chat-1"))
        fleet.publish({MODEL: ModelEndpoints(name=MODEL, endpoints=endpoints)}, now=START)
        self._metrics.held[MODEL] = 2

    def page(self, seconds: int) -> str:
        """Return the page after two requests per second, of which one in thirty ends with an error of the gateway."""
        metrics = self._metrics
        for count in range(2 * STEP):
            metrics.requests.labels(MODEL, f"chat-{count % 2}", "200").inc()
            metrics.first_byte.labels(MODEL).observe(0.4)
            metrics.duration.labels(MODEL).observe(2.0)
        metrics.errors.labels(MODEL, "503", "no_replica_ready").inc()
        metrics.hold_failures.labels(MODEL, "timeout").inc()
        metrics.retries.labels(MODEL, "busy").inc()
        metrics.broken_streams.labels(MODEL, "chat-0").inc()
        return metrics.render().decode()


class Operator:
    target = Target(labels={"namespace": OPERATOR_NAMESPACE, "pod": "operator-0"}, honours_labels=True)

    def __init__(self) -> None:
        self._telemetry = Telemetry()
        self._scaling = self._telemetry.scaling
        self._store = Store()
        self._resources = ResourceMetrics(self._store, leading=lambda: True)
        self._put_resources()

    def page(self, seconds: int) -> str:
        """Return the page after one pass of 3 ms per second; one in fifteen fails; a decision every 15 s."""
        telemetry, key = self._telemetry, str(Key(NAMESPACE, NAME))
        for _ in range(STEP):
            telemetry.reconciles.observe(0.003)
        telemetry.errors.labels(reason="Unavailable").inc()
        telemetry.written("patch", "LLMDeployment")
        telemetry.decisions.labels(reason="Steady").inc()
        telemetry.queue.set(4)
        telemetry.leading.set(1)
        telemetry.unlisted({"NetworkPolicy"})
        telemetry.watch_lag.set(1.5)
        self._scaling.ticks.observe(0.02)
        self._scaling.prometheus_failed("timeout")
        self._scaling.scrape_failed("timeout")
        self._scaling.show(
            lambda: {key: _decision()}, last_answer=lambda: float(START + seconds - 5), gateways=lambda: (2, 2)
        )
        now = datetime.fromtimestamp(START + seconds, UTC)
        return generate_latest(telemetry.registry).decode() + self._resources.text(now)

    def _put_resources(self) -> None:
        conditions = {
            "Ready": ("False", "RollingOut"),
            "Progressing": ("True", "RollingOut"),
            "Available": ("True", "ReplicaReady"),
            "Autoscaling": ("True", "Enforcing"),
        }
        listed = [{"type": t, "status": s, "reason": r} for t, (s, r) in conditions.items()]
        metadata = {"namespace": NAMESPACE, "name": NAME, "uid": "1", "resourceVersion": "1"}
        resource = {"metadata": metadata, "spec": {"model": {"servedName": MODEL}}, "status": {"conditions": listed}}
        self._store.put_resource(trim_resource(resource))
        key = Key(NAMESPACE, NAME)
        owner = {"kind": "LLMDeployment", "name": NAME, "uid": "1", "controller": True}
        deployment = {"metadata": {**metadata, "ownerReferences": [owner]}, "spec": {"replicas": 3}}
        self._store.put_child(key, trim_child(deployment, kind="Deployment"))
        for number in range(3):
            ready = {"type": "Ready", "status": str(number < 2), "lastTransitionTime": _text(START)}
            pod = {"metadata": {"name": f"chat-{number}", "creationTimestamp": _text(START)}}
            self._store.put_pod(key, trim_pod(pod | {"status": {"phase": "Running", "conditions": [ready]}}))


def _text(seconds: int) -> str:
    return datetime.fromtimestamp(seconds, UTC).isoformat().replace("+00:00", "Z")


def _decision() -> Decision:
    return Decision(
        time=0.0,
        current=3,
        desired=3,
        reason=Reason.STEADY,
        message="",
        inputs={"ready": 2.0, "waiting": 6.0},
        terms=(Term(reason=Reason.WORK, need=2.6, detail=""), Term(reason=Reason.KV_DEMAND, need=1.4, detail="")),
        victims=(),
        enforced=True,
        bounds=(1, 8),
        oldest_sample=time.time() - 7,
        history=History(),
    )


def openmetrics() -> str:
    """Return all samples with their times, as `promtool tsdb create-blocks-from openmetrics` reads them."""
    exporters = (Engine("chat-0"), Engine("chat-1"), Gateway(), Operator())
    lines = [
        line
        for step in range(STEPS)
        for exporter in exporters
        for line in _lines(exporter.page(step * STEP), exporter.target, START + step * STEP)
        for line in (line.replace("{", '{job="monitor",', 1), line.replace("{", '{job="annotations",', 1))
    ]
    return "\n".join([*lines, "# EOF", ""])


def _lines(page: str, target: Target, moment: int) -> Iterator[str]:
    for family in text_string_to_metric_families(page):
        for sample in family.samples:
            labels = {**target.labels, **sample.labels} if target.honours_labels else {**sample.labels, **target.labels}
            text = ",".join(f'{name}="{_escaped(value)}"' for name, value in labels.items())
            yield f"{sample.name}{{{text}}} {sample.value} {moment}"


def _escaped(value: str) -> str:
    return value.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
