"""A namespace of one scenario with its LLMDeployments.

If an expected state does not occur in time, the error contains conditions, pods, events and the operator's last log
lines.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, TypeVar

from e2e_support import objects
from e2e_support.explaining import Facts, explained
from e2e_support.kube import JSON, LLMDEPLOYMENTS, Kube, namespaced
from e2e_support.manifests import merged
from e2e_support.objects import Condition, Event, Pod
from e2e_support.waiting import until

READY_SECONDS: Final = 200.0
CONDITION_SECONDS: Final = 60.0
_LABEL: Final = "quire.dev/e2e"
SPACE_SELECTOR: Final = f"{_LABEL}=true"
"""The selector of all namespaces that scenarios create."""
T = TypeVar("T")
Words = Callable[[], Sequence[str]]


class Resource:
    """An applied LLMDeployment or LLMAdapter. `model` is the model name for requests to the gateway."""

    plural: str

    def __init__(self, kube: Kube, namespace: str, name: str, *, model: str) -> None:
        self.kube, self.namespace, self.name, self.model = kube, namespace, name, model
        self._path = namespaced(namespace, self.plural, name, group=LLMDEPLOYMENTS)

    def body(self) -> JSON:
        return self.kube.get(self._path)

    def status(self) -> JSON:
        found: JSON = self.body().get("status", {})
        return found

    def conditions(self) -> dict[str, Condition]:
        return objects.conditions(self.body())

    def events(self) -> list[Event]:
        """Return the events about it, its pods and its other children, oldest first."""
        found = [objects.event(body) for body in self.kube.items(namespaced(self.namespace, "events"))]
        mine = [event for event in found if event.name == self.name or event.name.startswith(f"{self.name}-")]
        return objects.in_order(mine)

    def delete(self) -> None:
        self.kube.delete(self._path)

    def until(self, look: Callable[[], T | None], *, what: str, seconds: float) -> T:
        """Wait like ``waiting.until``, with all known facts in the error."""
        return until(look, what=f"{self.namespace}/{self.name}: {what}", seconds=seconds, explain=self.explain)

    def explain(self) -> str:
        return json.dumps(self.status(), indent=2)


class LLMDeployment(Resource):
    plural = "llmdeployments"

    def __init__(self, kube: Kube, namespace: str, name: str, *, model: str, operator_log: Words) -> None:
        super().__init__(kube, namespace, name, model=model)
        self._operator_log = operator_log

    def patch(self, **spec: Any) -> None:
        """Apply a merge patch to the spec; None removes a field."""
        self.kube.patch(self._path, {"spec": spec})

    def pods(self) -> list[Pod]:
        """Return the pods, oldest first, including terminating ones."""
        path = namespaced(self.namespace, "pods")
        found = self.kube.items(path, selector=f"quire.dev/llmdeployment={self.name}")
        return [objects.pod(body) for body in sorted(found, key=lambda body: body["metadata"]["creationTimestamp"])]

    def serving_pods(self) -> list[Pod]:
        return [pod for pod in self.pods() if pod.is_serving]

    def newcomers(self, before: Sequence[Pod]) -> list[Pod]:
        """Return the serving pods that are not among those before."""
        known = {pod.uid for pod in before}
        return [pod for pod in self.serving_pods() if pod.uid not in known]

    def wait_ready(self, *, replicas: int | None = None, seconds: float = READY_SECONDS) -> Condition:
        """Wait until the current spec is Ready with this number of replicas."""
        wanted = "Ready" if replicas is None else f"Ready with {replicas} replicas"

        def look() -> Condition | None:
            body = self.body()
            ready = objects.conditions(body).get("Ready")
            count = body.get("status", {}).get("readyReplicas", 0)
            is_so = ready is not None and ready.is_true and ready.generation == body["metadata"]["generation"]
            return ready if is_so and replicas in (None, count) else None

        return self.until(look, what=wanted, seconds=seconds)

    def wait_condition(
        self, type: str, status: str, *, reason: str | None = None, seconds: float = CONDITION_SECONDS
    ) -> Condition:
        """Wait until the condition of the current spec has this status."""

        def look() -> Condition | None:
            body = self.body()
            found = objects.conditions(body).get(type)
            if found is None or found.generation != body["metadata"]["generation"]:
                return None
            return found if found.status == status and reason in (None, found.reason) else None

        what = f"{type}={status}" + (f" with reason {reason}" if reason else "")
        return self.until(look, what=what, seconds=seconds)

    def explain(self) -> str:
        facts = Facts(
            conditions=tuple(self.conditions().values()),
            pods=tuple(self.pods()),
            events=tuple(self.events()),
            operator_log=tuple(self._operator_log()),
        )
        return explained(facts)


class Space:
    """The namespace."""

    def __init__(self, kube: Kube, name: str, *, operator_log: Words) -> None:
        self.kube, self.name, self._operator_log = kube, name, operator_log

    def create(self) -> None:
        self.kube.create("/api/v1/namespaces", {"metadata": {"name": self.name, "labels": {_LABEL: "true"}}})

    def delete(self) -> None:
        """Delete the namespace in the background."""
        self.kube.delete(f"/api/v1/namespaces/{self.name}")

    def apply(self, manifest: Mapping[str, Any]) -> LLMDeployment:
        """Create or change an LLMDeployment, with a unique servedName."""
        name, spec = manifest["metadata"]["name"], manifest["spec"]
        model = spec["model"].get("servedName", self.unique(name))
        body = merged(manifest, {"metadata": {"namespace": self.name}, "spec": {"model": {"servedName": model}}})
        self.kube.kubectl("apply", "-f", "-", stdin=json.dumps(body))
        return self.llmdeployment(name, model=model)

    def llmdeployment(self, name: str, *, model: str | None = None) -> LLMDeployment:
        """Return an LLMDeployment that was applied otherwise, for example by `kubectl apply -f`."""
        return LLMDeployment(self.kube, self.name, name, model=model or name, operator_log=self._operator_log)

    def unique(self, name: str) -> str:
        """Return a served name that no other namespace uses, because one gateway serves all."""
        return f"{self.name}.{name}"

    def secret(self, name: str, content: Mapping[str, str]) -> None:
        self.kube.create(namespaced(self.name, "secrets"), {"metadata": {"name": name}, "stringData": dict(content)})

    def kubectl(self, *arguments: str, stdin: str = "") -> str:
        """Run kubectl in this namespace."""
        return self.kube.kubectl("--namespace", self.name, *arguments, stdin=stdin)

    def pods(self) -> list[Pod]:
        return [objects.pod(body) for body in self.kube.items(namespaced(self.name, "pods"))]
