"""One load ramp from one replica to three and back, with an outage of Prometheus and a kill of the leading operator.

`Play` runs the ramp and records it. It waits for expected events but asserts nothing else. The scenarios of
test_autoscaling.py check the recording.
"""

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Final

from e2e_support.faults import kill_for_good, without_prometheus
from e2e_support.long_streams import begin_one_by_one, long_streams, tokens_lasting
from e2e_support.manifests import small_llmdeployment
from e2e_support.objects import Event, Pod
from e2e_support.release import Page, Release
from e2e_support.scaling.looks import (
    AUTOSCALING,
    Look,
    ReplicaWatch,
    explain,
    explain_json,
    lines,
    reason_changes,
    recorded_decisions,
)
from e2e_support.space import LLMDeployment, Space
from e2e_support.target import Target
from e2e_support.timeline.model import timeline
from e2e_support.timeline.recording import keep
from e2e_support.traffic.client import Patience
from e2e_support.traffic.driver import Traffic
from e2e_support.traffic.prompts import Kind, of_kind
from e2e_support.traffic.result import TrafficResult
from e2e_support.waiting import until
from quire_cluster.real_cluster import RealCluster

JSON = Mapping[str, Any]
SEQUENCES: Final = 8
CALM: Final = 2
"""The number of concurrent requests that one replica easily serves."""
BUSY: Final = 20
"""A number for which two replicas are too few: each is planned for 0.8 × SEQUENCES."""
STREAMS, STREAM_SECONDS = 5, 15.0
"""The number of long streams during scale-down. With one more request, one replica still suffices."""
PATIENCE: Final = Patience(silence_seconds=240.0)
"""The patience of a client that waits in a queue for a non-streamed answer, on a busy machine."""
TICK_SECONDS: Final = 15.0
"""The interval of the operator's ticks."""
PULL_SECONDS: Final = 240.0
"""The limit for the first replica, whose node may not have the image yet."""
DECIDE_SECONDS, START_SECONDS, SHRINK_SECONDS, END_SECONDS = 90.0, 240.0, 180.0, 120.0
"""The limit for giving up. The promised times are shorter."""


class At(StrEnum):
    """Times of actions and events."""

    LOAD_UP = "load rises"
    PROMETHEUS_DOWN = "Prometheus killed"
    LEADER_KILLED = "leading operator killed"
    LEADER_NEW = "another operator leads"
    PROMETHEUS_UP = "Prometheus is back"
    LOAD_DOWN = "load falls"


@dataclass(slots=True, kw_only=True)
class Ramp:
    """The recording of a ramp. Times are seconds since the start of the traffic."""

    deployment: LLMDeployment
    times: dict[At, float] = field(default_factory=dict)
    looks: list[Look] = field(default_factory=list)
    leaders: list[Pod] = field(default_factory=list)
    """The leaders before and after the kill."""
    blind: JSON = field(default_factory=dict)
    """The output of `quire explain --json` without Prometheus."""
    blind_words: str = ""
    blind_metrics: Page | None = None
    """The metrics of the leading operator at that time."""
    words: str = ""
    """The output of `quire explain` at the end."""
    final: JSON = field(default_factory=dict)
    """The LLMDeployment at the end."""
    final_metrics: Page | None = None
    events: list[Event] = field(default_factory=list)
    traffic: TrafficResult | None = None
    streams: TrafficResult | None = None
    """The long streams during scale-down."""

    @property
    def result(self) -> TrafficResult:
        assert self.traffic is not None, "the traffic is over"
        return self.traffic

    def keep_timeline(self) -> None:
        """Store the recording below out/e2e, even if it is incomplete."""
        keep(
            timeline(
                "autoscaling",
                self.result,
                self.streams,
                replicas=lines(self.looks),
                messages=reason_changes(self.looks, "Autoscaling"),
            )
        )

    @property
    def labels(self) -> dict[str, str]:
        """Return the labels of the LLMDeployment in the operator's metrics."""
        return {"namespace": self.deployment.namespace, "name": self.deployment.name}


def manifest() -> JSON:
    return small_llmdeployment(
        "chat",
        engine={"maxSequences": SEQUENCES, "maxModelLength": None},
        # Of a core: streams last, and three replicas leave something of two cores.
        resources={"requests": {"cpu": "100m"}, "limits": {"cpu": "400m"}},
        autoscaling={
            "minReplicas": 1,
            "maxReplicas": 3,
            "metricsSource": "Prometheus",
            # With less to spare the last minutes' bursts are forgotten sooner.
            "targets": {"timeToFirstToken": {"percentile": 50}},
            # One at a time, so that there is a ramp: the second is not allowed before the figures are too old.
            "scaleUp": {"maxStep": 1, "maxPercent": 0, "period": "60s"},
            "scaleDown": {"window": "15s", "maxStep": 1, "period": "15s"},
        },
        drain={"timeout": "180s"},
    )


class Play:
    """A running ramp."""

    def __init__(self, target: Target, release: Release, space: Space, url: str) -> None:
        self._target, self._release, self._url = target, release, url
        self._chat = space.apply(manifest())
        self.ramp = Ramp(deployment=self._chat)

    def run(self, *, outage_seconds: float) -> Ramp:
        chat, ramp = self._chat, self.ramp
        chat.wait_ready(replicas=1, seconds=PULL_SECONDS)
        with (
            Traffic(
                self._url, model=chat.model, prompts=of_kind(Kind.LONG), concurrency=CALM, patience=PATIENCE
            ) as self._traffic,
            ReplicaWatch(chat, clock=self._traffic.now) as self._watch,
        ):
            try:
                self._go(outage_seconds)
            finally:
                ramp.looks, ramp.traffic = self._watch.looks, self._traffic.stop()
                ramp.keep_timeline()
        return ramp

    def _go(self, outage_seconds: float) -> None:
        chat, ramp, watch = self._chat, self.ramp, self._watch
        chat.until(self._is_read, what="the operator has figures of it from Prometheus", seconds=DECIDE_SECONDS)
        self._mark(At.LOAD_UP)
        self._traffic.set_concurrency(BUSY)
        watch.until(lambda look: look.desired == 2, what="two replicas are asked for", seconds=DECIDE_SECONDS)
        if self._target.machine is not None:
            self._lose_prometheus(self._target.machine, outage_seconds)
        else:
            self._kill_leader()
        watch.until(lambda look: look.desired == 3, what="three replicas are asked for", seconds=DECIDE_SECONDS)
        watch.until(lambda look: look.ready == 3, what="three replicas are ready", seconds=START_SECONDS)
        self._shrink()
        ramp.final, ramp.events = chat.body(), chat.events()
        ramp.words, ramp.final_metrics = explain(self._target.kube, chat, last=40), self._release.operator_metrics()

    def _lose_prometheus(self, machine: RealCluster, seconds: float) -> None:
        chat, ramp, kube = self._chat, self.ramp, self._target.kube
        until(
            lambda: recorded_decisions(machine, chat.namespace)[-1:] == [2],
            what="Prometheus has recorded the decision for two replicas",
            seconds=DECIDE_SECONDS,
        )
        down = self._mark(At.PROMETHEUS_DOWN)
        with without_prometheus(machine):
            chat.wait_condition("Autoscaling", "False", reason="PrometheusUnavailable", seconds=DECIDE_SECONDS)
            ramp.blind, ramp.blind_words = explain_json(kube, chat), explain(kube, chat)
            ramp.blind_metrics = self._release.operator_metrics()
            self._kill_leader()
            time.sleep(max(0.0, down + seconds - self._traffic.now()))
        self._mark(At.PROMETHEUS_UP)

    def _kill_leader(self) -> None:
        before = self._release.wait_leader()
        self._mark(At.LEADER_KILLED)
        kill_for_good(self._target, before, container="operator")
        after = self._release.wait_leader(after=before, seconds=DECIDE_SECONDS)
        self._mark(At.LEADER_NEW)
        self.ramp.leaders = [before, after]

    def _shrink(self) -> None:
        watch, traffic, model = self._watch, self._traffic, self._chat.model
        self._mark(At.LOAD_DOWN)
        traffic.set_concurrency(1)
        # Else the long ones would all go to the newest replica, which has the least to do.
        traffic.wait_for(lambda live: live.in_flight <= 1, END_SECONDS, "what waited is answered")
        tokens = tokens_lasting(STREAM_SECONDS, self._url, model)
        with long_streams(self._url, model, beyond=tokens, beside=traffic) as streams:
            begin_one_by_one(streams, STREAMS)
            watch.until(lambda look: look.desired == 1, what="one replica is enough", seconds=SHRINK_SECONDS)
            watch.until(lambda look: len(look.pods) == 1, what="the others are gone", seconds=END_SECONDS)
            self.ramp.streams = streams.stop()

    def _is_read(self) -> bool:
        page = self._release.operator_metrics()
        return page.total(f"{AUTOSCALING}input", **self.ramp.labels, input="fresh") == 1

    def _mark(self, what: At) -> float:
        self.ramp.times[what] = self._traffic.mark(what)
        return self.ramp.times[what]
