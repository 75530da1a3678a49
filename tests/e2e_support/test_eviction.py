"""The answers of the Eviction API become reasons; other failures stay errors."""

from collections.abc import Mapping
from typing import Any

import pytest

from e2e_support import objects
from e2e_support.errors import ApiError, NotFound
from e2e_support.eviction import evict

POD = objects.pod({"metadata": {"name": "chat-1", "namespace": "space", "uid": "u-1"}})


class Kube:
    """A fake client that records requests and gives one answer."""

    def __init__(self, answer: Exception | None = None) -> None:
        self.answer = answer
        self.asked: list[tuple[str, Mapping[str, Any]]] = []

    def create(self, path: str, body: Mapping[str, Any]) -> dict[str, Any]:
        self.asked.append((path, body))
        if self.answer is not None:
            raise self.answer
        return {}


def test_granted_eviction_has_the_uid_of_the_pod():
    kube = Kube()
    assert evict(kube, POD) == ""
    ((path, body),) = kube.asked
    assert path == "/api/v1/namespaces/space/pods/chat-1/eviction"
    assert body["deleteOptions"] == {"preconditions": {"uid": "u-1"}}


def test_dry_run_evicts_no_pod():
    kube = Kube()
    evict(kube, POD, dry_run=True)
    assert kube.asked[0][1]["deleteOptions"]["dryRun"] == ["All"]


def test_a_budget_refuses_with_429():
    why = "it would violate the pod's disruption budget"
    assert evict(Kube(ApiError(why, status=429)), POD) == why


@pytest.mark.parametrize("error", [ApiError("forbidden", status=403), NotFound("gone", status=404)])
def test_any_other_refusal_is_an_error(error):
    with pytest.raises(ApiError, match=str(error)):
        evict(Kube(error), POD)
