"""The review of an LLMDeployment, with an API server whose answers the test chooses."""

import asyncio
from collections.abc import Mapping
from typing import Any

import pytest
from specs import llmdeployment

from quire_operator import admission
from quire_operator.admission import ALLOWED, Review, Reviewer
from quire_operator.api import Spec
from quire_operator.deployment.conditions import BlockingCondition
from quire_operator.deployment.manifests import Manifest
from quire_operator.deployment.pod_template import Images
from quire_operator.kube.errors import Forbidden, Refused, Throttled, Unavailable
from quire_operator.kube.objects import Child, Key, Owner, Ref

UID = "6f3c"
HOSTNAME = "kubernetes.io/hostname"


class ApiServer:
    """A ``KubeClient`` with chosen answers."""

    def __init__(self, *, owner: str | None = None, taken: str = "", answer: Exception | None = None) -> None:
        self._owner, self._taken, self._answer = owner, taken, answer
        self.tried: list[Manifest] = []

    async def read_child(self, key: Key, ref: Ref) -> Child | None:
        if self._owner is None or self._taken not in ("", str(ref)):
            return None
        owner = Owner(kind="LLMDeployment", name="chat", uid=self._owner) if self._owner else None
        return Child(ref=ref, uid="1", version="1", owner=owner, deleting=False, fingerprint="", foreign=())

    async def check_template(self, key: Key, manifest: Manifest) -> None:
        self.tried.append(manifest)
        if self._answer is not None:
            raise self._answer


def body(spec: Mapping[str, Any] | None = None, **metadata: Any) -> dict[str, Any]:
    made = llmdeployment({"namespace": "shop", "uid": UID, "managedFields": [{}], **metadata}, replicas=3)
    return made if spec is None else made | {"spec": spec}


def review(new: Mapping[str, Any], old: Mapping[str, Any] | None = None, server: ApiServer | None = None) -> Review:
    reviewer = Reviewer(kube=server or ApiServer(), images=Images(engine="engine"))
    return asyncio.run(reviewer.review(new, old))


def test_valid_spec_passes_a_dry_run_and_is_allowed() -> None:
    server = ApiServer()

    assert review(body(), server=server) == ALLOWED

    (tried,) = server.tried
    assert tried.ref == Ref("Deployment", "chat")
    assert tried.body["spec"]["replicas"] == 3  # type: ignore[index]


def test_all_problems_are_listed_one_per_line() -> None:
    server = ApiServer()
    spec = {
        "model": {"source": "ftp://x"},
        "engine": {"extraArgs": ["--no-such-flag"], "blocksize": 16},
        "rollout": {"maxSurge": 0, "maxUnavailable": 0},
        "podTemplate": {"spec": {"hostNetwork": True}},
    }

    verdict = review(body(spec), server=server)

    assert server.tried == []
    lines = verdict.message.splitlines()
    assert lines[0] == "5 problems:"
    assert [line.split(":")[0] for line in lines[1:]] == [
        "  - spec.model.source",
        "  - spec.engine.blocksize",
        "  - spec.rollout.maxUnavailable",
        "  - spec.engine.extraArgs[0]",
        "  - spec.podTemplate.spec.hostNetwork",
    ]


def test_one_problem_is_one_line() -> None:
    verdict = review(body({"model": {"source": "hf://org/name"}, "podTemplate": {"spec": {"hostNetwork": True}}}))

    assert verdict.message.startswith("spec.podTemplate.spec.hostNetwork: ")


def test_dry_run_error_is_shown_as_the_server_wrote_it() -> None:
    server = ApiServer(answer=Refused('Deployment.apps "chat" is invalid: spec.template.spec.x: Required value'))

    verdict = review(body(), server=server)

    assert verdict.message.endswith("spec.template.spec.x: Required value")
    assert verdict.warnings == ()


@pytest.mark.parametrize(
    "error", [Unavailable("it hangs"), Throttled("later", after_seconds=1.0), Forbidden("no right")], ids=repr
)
def test_silent_server_causes_a_warning_and_no_refusal(error: Exception) -> None:
    verdict = review(body(), server=ApiServer(answer=error))

    assert verdict.problems == ()
    assert str(error) in verdict.warnings[0]


NEEDED = ("ServiceAccount chat", "Service chat", "Service chat-headless", "PodDisruptionBudget chat", "Deployment chat")


@pytest.mark.parametrize("taken", NEEDED)
def test_new_deployment_is_refused_if_a_child_has_another_owner(taken: str) -> None:
    server = ApiServer(owner="", taken=taken)

    verdict = review(body(), server=server)

    (problem,) = verdict.problems
    assert (problem.path, server.tried) == ("metadata.name", [])
    assert problem.message.startswith(f"{taken} in shop already exists")


def test_update_with_a_taken_child_name_is_a_warning() -> None:
    server = ApiServer(owner="", taken="Service chat")

    verdict = review(body({"model": {"source": "hf://org/name"}}), body(), server=server)

    assert (verdict.problems, server.tried) == ((), [])
    assert verdict.warnings[0].startswith("metadata.name: Service chat in shop")


@pytest.mark.parametrize(
    ("cache", "more", "is_refused"),
    [
        ({"size": "1Gi"}, {"replicas": 2}, True),
        ({"size": "1Gi"}, {"autoscaling": {"maxReplicas": 2}}, True),
        ({"size": "1Gi", "accessMode": "ReadWriteMany"}, {"replicas": 2}, False),
        ({"size": "1Gi"}, {"replicas": 1}, False),
        ({"claimName": "models"}, {"replicas": 2}, False),
        ({"size": "1Gi"}, {"replicas": 2, "podTemplate": {"spec": {"nodeSelector": {HOSTNAME: "a"}}}}, False),
        ({"size": "1Gi"}, {"replicas": 2, "podTemplate": {"spec": {"nodeSelector": {"zone": "a"}}}}, True),
    ],
)
def test_replicas_that_cannot_share_a_volume_are_refused(
    cache: dict[str, str], more: dict[str, Any], is_refused: bool
) -> None:
    verdict = review(body({"model": {"source": "hf://org/name", "cache": cache}} | more))

    assert [problem.path for problem in verdict.problems] == (["spec.model.cache.accessMode"] if is_refused else [])


def test_existing_deployment_of_the_owner_is_no_conflict() -> None:
    assert review(body(), server=ApiServer(owner=UID)) == ALLOWED


@pytest.mark.parametrize(
    ("new", "old"),
    [
        (body({"model": {}}, labels={"a": "b"}), body({"model": {}})),
        (body({"model": {}}, deletionTimestamp="2026-01-01T00:00:00Z"), body()),
    ],
    ids=["a label on what is stored", "its deletion"],
)
def test_stored_invalid_spec_can_still_be_updated(new: Mapping[str, Any], old: Mapping[str, Any]) -> None:
    assert review(new, old) == ALLOWED


def test_changed_invalid_spec_is_refused() -> None:
    assert review(body({"model": {"servedName": "x"}}), body({"model": {}})).problems


class Estimate:
    """The part of a ``CapacityCheck`` that a review uses."""

    async def refusal(self, spec: Spec) -> BlockingCondition | None:
        return BlockingCondition(reason="InsufficientGPUMemory", message=f"{spec.name} needs 19.3 GiB")


def test_capacity_and_dry_run_warnings_are_combined() -> None:
    reviewer = Reviewer(
        kube=ApiServer(owner="another-uid"),
        images=Images(engine="engine"),
        capacity=Estimate(),  # type: ignore[arg-type]
    )
    verdict = asyncio.run(reviewer.review(body(), None))
    assert verdict.problems == () and len(verdict.warnings) == 2
    assert verdict.warnings[-1] == "InsufficientGPUMemory: chat needs 19.3 GiB"


class Slow(Estimate):
    async def refusal(self, spec: Spec) -> BlockingCondition | None:
        await asyncio.Event().wait()
        return None


def test_slow_capacity_estimate_is_skipped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(admission, "ESTIMATE_SECONDS", 0.01)
    images = Images(engine="engine")
    reviewer = Reviewer(kube=ApiServer(), images=images, capacity=Slow())  # type: ignore[arg-type]
    assert asyncio.run(reviewer.review(body(), None)) == ALLOWED
