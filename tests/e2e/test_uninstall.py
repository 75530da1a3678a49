"""helm uninstall removes operator and gateway but keeps serving replicas; a new release takes them over. Runs last."""

import pytest

from e2e_support.kube import namespaced
from e2e_support.manifests import small_llmdeployment
from e2e_support.release import Release
from e2e_support.results import Report
from e2e_support.space import LLMDeployment, Space
from e2e_support.target import Target
from e2e_support.timeline.recording import recorded
from e2e_support.traffic import Traffic
from e2e_support.waiting import Stopwatch, until

CRD = "/apis/apiextensions.k8s.io/v1/customresourcedefinitions/llmdeployments.quire.dev"


@pytest.mark.last
def test_serving_survives_uninstall_and_is_taken_over(
    release: Release, space: Space, target: Target, report: Report
) -> None:
    chat = space.apply(small_llmdeployment("chat", replicas=1))
    chat.wait_ready(replicas=1)
    definition = space.kube.get(CRD)["metadata"]["uid"]
    before = children(chat)
    with recorded(
        Traffic(target.service_url(space.name, "chat"), model=chat.model, concurrency=1), report, chat
    ) as traffic:
        traffic.wait_for_answers(2, "from its own Service")

        traffic.mark("helm uninstall")
        release.uninstall()
        until(
            lambda: not release.operator_pods() and not release.gateway_pods(),
            what="operator and gateway are gone",
            seconds=60,
        )
        traffic.mark("all of it gone")
        traffic.wait_for_answers(3, "without an operator")
        assert space.kube.get(CRD)["metadata"]["uid"] == definition
        assert children(chat) == before

        traffic.mark("helm install")
        watch = Stopwatch()
        release.install()
        chat.until(lambda: is_known_to(release, chat), what="the new operator knows it", seconds=60)
        report.figure("reinstalled to LLMDeployments taken over", watch.seconds)
        assert children(chat) == before, "no object was recreated or changed"

        traffic.mark("one replica more")
        chat.patch(replicas=2)
        chat.wait_ready(replicas=2)
        first, _ = chat.pods()
        assert (first.uid, first.restarts) == before[f"pod {first.name}"]


def is_known_to(release: Release, chat: LLMDeployment) -> bool:
    page = release.operator_metrics()
    has_looked = page.total("quire_operator_reconcile_seconds_count") >= 1
    return has_looked and page.total("quire_operator_llmdeployment_info", namespace=chat.namespace, name=chat.name) == 1


def children(chat: LLMDeployment) -> dict[str, tuple[str, int]]:
    """Return the children and the values that would show a change or a restart."""
    found = {f"pod {pod.name}": (pod.uid, pod.restarts) for pod in chat.pods()}
    deployment = chat.kube.get(namespaced(chat.namespace, "deployments", chat.name, group="/apis/apps/v1"))["metadata"]
    found["deployment"] = (deployment["uid"], deployment["generation"])
    body = chat.body()["metadata"]
    return found | {"llmdeployment": (body["uid"], body["generation"])}
