"""helm upgrade of a serving release: operator and gateway are replaced, no stream is cut, no engine restarts."""

import re

from e2e_support.kube import namespaced
from e2e_support.manifests import small_llmdeployment
from e2e_support.model_bucket import model_bucket
from e2e_support.release import Release
from e2e_support.results import Report
from e2e_support.space import Space
from e2e_support.target import Target
from e2e_support.timeline.recording import recorded
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
        traffic.wait_for(lambda live: live.in_flight >= 3 and live.streams != {}, 60, "streams")
        traffic.mark("helm upgrade")
        watch = Stopwatch()
        release.upgrade({"operator": {"logLevel": "debug", "resync": "5m"}, "gateway": {"logLevel": "debug"}})
        release.wait_working()
        report.figure("helm upgrade to new operator leading and new gateways ready", watch.seconds)
        now = [*release.operator_pods(), *release.gateway_pods()]
        assert old.isdisjoint(pod.uid for pod in now if not pod.is_ending), "an old gateway may still end its streams"
        traffic.mark("rolled")
        traffic.wait_for_answers(3, "by the new gateways")

        traffic.mark("helm rollback")
        release.rollback()
        release.wait_working()
        assert release.values == before
    assert {(pod.uid, pod.restarts) for pod in chat.pods()} == engines


def test_new_operator_image_restarts_no_engine_of_a_download(
    release: Release, space: Space, target: Target, gateway_url: str, report: Report
) -> None:
    """The model is downloaded from a bucket in the cluster; the operator's image gets another reference."""
    source = model_bucket(space, image=target.engine_image)
    chat = space.apply(small_llmdeployment("chat", replicas=2, model={"source": source}))
    chat.wait_ready(replicas=2)
    (version,) = chat.status()["model"]["podVersions"]
    assert re.fullmatch("[0-9a-f]{40}", version), "all pods downloaded the same version"
    engines = {(pod.uid, pod.restarts) for pod in chat.pods()}
    digest, before = operator_digest(release), release.values
    with recorded(
        Traffic(gateway_url, model=chat.model, prompts=of_kind(Kind.LONG), concurrency=2), report, chat
    ) as traffic:
        traffic.wait_for(lambda live: live.in_flight >= 2 and live.streams != {}, 60, "streams")
        traffic.mark("helm upgrade to another operator image")
        release.upgrade({"images": {"operator": {"digest": digest}}})
        release.wait_working()
        assert all(image.endswith(f"@{digest}") for image in operator_images(release)), "another reference"

        traffic.mark("the new operator acts")
        chat.patch(replicas=3)
        chat.wait_ready(replicas=3)
        assert engines < {(pod.uid, pod.restarts) for pod in chat.pods()}, "it added a replica and replaced none"

        traffic.mark("helm rollback")
        release.rollback()
        release.wait_working()
        assert release.values == before
    assert engines < {(pod.uid, pod.restarts) for pod in chat.pods()}


def operator_images(release: Release) -> list[str]:
    """Return the image of each operator pod that is not being deleted, as its manifest names it."""
    running = {pod.name for pod in release.operator_pods() if not pod.is_ending}
    found = (body for body in release.kube.items(namespaced(release.namespace, "pods")))
    return [body["spec"]["containers"][0]["image"] for body in found if body["metadata"]["name"] in running]


def operator_digest(release: Release) -> str:
    """Return the digest of the operator's image, as a node reports it."""
    (pod, *_) = release.operator_pods()
    body = release.kube.get(namespaced(release.namespace, "pods", pod.name))
    _, at, digest = str(body["status"]["containerStatuses"][0]["imageID"]).rpartition("@")
    assert at, "the image was pulled from a registry"
    return digest
