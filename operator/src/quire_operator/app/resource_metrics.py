"""Metrics about LLMDeployments: conditions, replicas by state, and the longest current start-up.

They are written as text, because a thousand LLMDeployments have twelve thousand series, for which the client library
takes four times as long.
"""

from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from functools import lru_cache

from quire_operator.api.fields import items_of, parse_time
from quire_operator.deployment.served_names import spec_name
from quire_operator.deployment.store import Store
from quire_operator.kube.objects import Key, Pod, Resource, own_deployment

_CONDITION = "quire_operator_llmdeployment_condition"
_INFO = "quire_operator_llmdeployment_info"
_REPLICAS = "quire_operator_llmdeployment_replicas"
_STARTING = "quire_operator_llmdeployment_starting_seconds"
_HELP: Mapping[str, str] = {
    _CONDITION: "1 for each condition in status, by type, status and reason.",
    _INFO: "1; the labels contain the served model.",
    _REPLICAS: "Replicas by state: asked, ready, starting, terminating.",
    _STARTING: "Longest current start-up time of a replica; 0 if no replica is starting.",
}

_ESCAPES = str.maketrans({"\\": "\\\\", '"': '\\"', "\n": "\\n"})


class ResourceMetrics:
    """The metrics of all LLMDeployments, in Prometheus' text format."""

    def __init__(self, store: Store, *, leading: Callable[[], bool]) -> None:
        self._store, self._leading = store, leading

    def text(self, now: datetime) -> str:
        """Return the text for one scrape. It is empty unless this process leads, so that no series is counted twice."""
        if not self._leading():
            return ""
        families: dict[str, list[str]] = {name: [] for name in _HELP}
        for key in self._store.live_keys():
            resource = self._store.resource(key)
            if resource is not None:
                self._add(families, key, resource, now)
        return "".join(_family(name, lines) for name, lines in families.items())

    def _add(self, families: Mapping[str, list[str]], key: Key, resource: Resource, now: datetime) -> None:
        who = f'namespace="{key.namespace}",name="{key.name}"'
        families[_INFO].append(f'{_INFO}{{{who},model_name="{_escaped(spec_name(resource) or key.name)}"}} 1\n')
        conditions = families[_CONDITION]
        for condition in items_of(resource.status, "conditions"):
            type_, status, reason = (_escaped(str(condition.get(label, ""))) for label in ("type", "status", "reason"))
            conditions.append(f'{_CONDITION}{{{who},type="{type_}",status="{status}",reason="{reason}"}} 1\n')
        pods = [pod for pod in self._store.pods(key) if pod.phase not in ("Failed", "Succeeded")]
        for state, count in self._counts(resource, pods).items():
            families[_REPLICAS].append(f'{_REPLICAS}{{{who},state="{state}"}} {count}\n')
        families[_STARTING].append(f"{_STARTING}{{{who}}} {_longest_start(pods, now):.0f}\n")

    def _counts(self, resource: Resource, pods: Sequence[Pod]) -> dict[str, int]:
        state = own_deployment(resource, self._store.children(resource.key))
        terminating = sum(pod.deleting for pod in pods)
        ready = sum(pod.ready and not pod.deleting for pod in pods)
        return {
            "asked": 0 if state is None else state.replicas_asked,
            "ready": ready,
            "starting": len(pods) - ready - terminating,
            "terminating": terminating,
        }


def _family(name: str, lines: list[str]) -> str:
    return f"# HELP {name} {_HELP[name]}\n# TYPE {name} gauge\n{''.join(lines)}" if lines else ""


@lru_cache(maxsize=4096)
def _escaped(text: str) -> str:
    """Return the text, escaped as the value of a label. The cache helps because few texts occur."""
    return text.translate(_ESCAPES)


def _longest_start(pods: Sequence[Pod], now: datetime) -> float:
    """Return the longest current start-up in seconds. A replica that lost readiness counts from that moment."""
    begun = [parse_time(pod.ready_changed or pod.created) for pod in pods if not pod.ready and not pod.deleting]
    return max((max(0.0, now.timestamp() - time) for time in begun if time is not None), default=0.0)
