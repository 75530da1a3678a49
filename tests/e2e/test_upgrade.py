"""helm upgrade of a serving release: operator and gateway are replaced, no stream is cut, no engine restarts."""

from e2e_support.manifests import small_llmdeployment
from e2e_support.recording import recorded
from e2e_support.release import Release
from e2e_support.results import Report
from e2e_support.space import Space
from e2e_support.traffic import Kind, Traffic, of_kind
from e2e_support.waiting import Stopwatch


def test_an_upgrade_under_traffic_fails_no_request(
    release: Release, space: Space, gateway_url: str, report: Report
) -> None:
    chat = space.apply(small_llmdeployment("chat", replicas=2))
    chat.wait_ready(replicas=2)
    engines = {(pod.uid, pod.restarts) for pod in chat.pods()}
    old = {pod.uid for pod in [*release.operator_pods(), *release.gateway_pods()]}
    before = release.values
    with recorded(
        Traffic(gateway_url, model=chat.model, prompts=of_kind(Kind.LONG), concurrency=3), report, chat
    ) as traffic:
        traffic.wait_for(lambda live: live.in_flight >= 3 and live.streams != {}, 30, "streams")
        traffic.mark("helm upgrade")
        watch = Stopwatch()
        release.upgrade({"operator": {"logLevel": "debug", "resync": "5m"}, "gateway": {"logLevel": "debug"}})
        release.wait_working()
        report.figure("helm upgrade to new operator leading and new gateways ready", watch.seconds)
        now = [*release.operator_pods(), *release.gateway_pods()]
        assert old.isdisjoint(pod.uid for pod in now if not pod.is_ending), "an old gateway may still end its streams"
        answered = traffic.live().completed
        traffic.mark("rolled")
        traffic.wait_for(lambda live: live.completed >= answered + 3, 60, "answers by the new gateways")

        traffic.mark("helm rollback")
        release.rollback()
        release.wait_working()
        assert release.values == before
    assert {(pod.uid, pod.restarts) for pod in chat.pods()} == engines
