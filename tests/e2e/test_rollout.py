"""A changed spec under traffic: replicas are replaced one by one, and no client notices.

In the second scenario, streams are longer than the drain of the replicas, so that they continue on other replicas.
"""

from e2e_support.long_streams import tokens_lasting
from e2e_support.manifests import small_llmdeployment
from e2e_support.objects import Condition, Pod
from e2e_support.release import Release
from e2e_support.results import Report
from e2e_support.space import LLMDeployment, Space
from e2e_support.timeline.recording import recorded
from e2e_support.traffic import Form, Kind, Patience, Traffic, of_kind
from e2e_support.waiting import Stopwatch

REPLICAS = 2
STREAMS, STREAM_SECONDS = 8, 5.0
"""The streams in progress, and how long each lasts alone: longer than a drain, also on a fast machine."""
PATIENCE = Patience(silence_seconds=120.0)
RESUMED = "quire_gateway_resumed_streams_total"


def test_a_changed_spec_replaces_replicas_without_failures(
    release: Release, space: Space, gateway_url: str, report: Report
) -> None:
    chat = space.apply(small_llmdeployment("chat", replicas=REPLICAS))
    chat.wait_ready(replicas=REPLICAS)
    old = {pod.uid for pod in chat.pods()}
    revision = chat.status()["currentRevision"]
    with recorded(Traffic(gateway_url, model=chat.model, concurrency=2), report, chat) as traffic:
        traffic.wait_for_answers(4, "by the old replicas")
        traffic.mark("spec.engine.maxSequences: 8 → 6")
        # Before the change: the operator may have added a replica by the time that its request is answered.
        watch, seen = Stopwatch(), Seen(chat)
        chat.patch(engine={"maxSequences": 6})
        chat.until(seen.is_through, what="every replica is of the new version and ready", seconds=180)
        report.figure(f"spec edit to all {REPLICAS} replicas replaced", watch.seconds)
        traffic.mark("rolled out")
        traffic.wait_for_answers(4, "by the new replicas")

    assert seen.fewest_serving >= REPLICAS, "maxUnavailable is 0"
    assert "RollingOut" in seen.reasons
    assert old.isdisjoint(pod.uid for pod in chat.serving_pods())
    assert all(pod.restarts == 0 for pod in chat.pods())
    assert chat.status()["currentRevision"] != revision
    assert chat.conditions()["Progressing"].reason == "Complete"
    assert not chat.conditions()["Degraded"].is_true
    served_by = {record.replica for record in traffic.result.records}
    assert len(served_by) == 2 * REPLICAS, "both versions had their share"
    page = release.operator_metrics()
    who = {"namespace": chat.namespace, "name": chat.name}
    assert page.values("quire_operator_llmdeployment_replicas", **who, state="ready") == [REPLICAS]


def test_resumable_streams_outlive_their_replicas(
    release: Release, space: Space, gateway_url: str, report: Report
) -> None:
    chat = space.apply(
        small_llmdeployment(
            "chat",
            replicas=REPLICAS,
            engine={
                "resumable": "Enabled",
                "maxModelLength": 4096,
                "maxSequences": 2 * STREAMS,
                "kvCache": {"size": "256Mi"},
            },
            drain={"timeout": "1s"},
            rollout={"maxSurge": 0, "maxUnavailable": 1},
        )
    )
    chat.wait_ready(replicas=REPLICAS)
    old = {pod.uid for pod in chat.pods()}
    streams = Traffic(
        gateway_url,
        model=chat.model,
        prompts=of_kind(Kind.LONG),
        forms=(Form.STREAM_TOKENS,),
        concurrency=STREAMS,
        beyond=tokens_lasting(STREAM_SECONDS, gateway_url, chat.model),
        patience=PATIENCE,
    )
    with recorded(streams, report, chat) as traffic:
        traffic.wait_for(lambda live: sum(live.streams.values()) >= STREAMS, 60, f"{STREAMS} streams")
        changed = traffic.mark("spec.engine.maxBatchedTokens: 512 → 500")
        chat.patch(engine={"maxBatchedTokens": 500})
        chat.until(lambda: not _serving(chat, old), what="every replica was replaced", seconds=240)
        through = traffic.mark("every replica was replaced")
        report.figure(f"spec edit to all {REPLICAS} replicas replaced, none in addition", through - changed)
        traffic.pause()
    moved = sum(page.total(RESUMED, model=chat.model) for page in release.gateway_metrics())
    report.figure("streams continued on another replica", moved, "")
    assert moved > 0, "the rollout met no stream"
    gaps = [max(record.chunk_gaps, default=0.0) for record in traffic.result.records]
    report.figure("longest gap between two events of a stream", max(gaps))


def _serving(chat: LLMDeployment, uids: set[str]) -> list[Pod]:
    return [pod for pod in chat.serving_pods() if pod.uid in uids]


class Seen:
    """The observations of a rollout at each poll."""

    def __init__(self, chat: LLMDeployment) -> None:
        self._chat = chat
        self._before = {pod.uid for pod in chat.pods()}
        self.fewest_serving = REPLICAS
        self.reasons: set[str] = set()

    def is_through(self) -> Condition | None:
        pods, conditions = self._chat.pods(), self._chat.conditions()
        self.fewest_serving = min(self.fewest_serving, sum(pod.is_serving for pod in pods))
        self.reasons.add(conditions["Ready"].reason)
        new = [pod for pod in pods if pod.uid not in self._before and pod.is_serving]
        is_over = len(new) == REPLICAS == len([pod for pod in pods if not pod.is_ending])
        return conditions["Ready"] if is_over and conditions["Ready"].is_true else None
