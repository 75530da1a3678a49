"""NetworkPolicies, and the PodMonitors and PrometheusRules by which a Prometheus reads replicas. Pure."""

from collections.abc import Iterator, Mapping, Sequence

from quire_common.contract import engine
from quire_common.quantities import format_duration
from quire_operator.api import Autoscaling, LatencyTarget, Spec
from quire_operator.api.fields import Problem, shown
from quire_operator.api.names import LABEL_DEPLOYMENT
from quire_operator.deployment.manifests import Monitoring

_PEER_FIELDS = frozenset({"ipBlock", "namespaceSelector", "podSelector"})


def network_policy(
    peers: Sequence[Mapping[str, object]], *, selector: Mapping[str, object], nodes: int = 1
) -> dict[str, object]:
    """Return the spec of a policy that lets only these peers reach the port of replicas.

    The pods of groups with several ``nodes`` reach all ports of each other, because gloo and NCCL listen on ports that
    the kernel chooses. Policies cannot name one group, so that the pods of all groups of the LLMDeployment may connect;
    the group's secret keeps those apart that start at the same time.
    """
    assert peers, "a rule with no peers lets everybody in"
    rules: list[Mapping[str, object]] = [
        {"from": list(peers), "ports": [{"port": engine.HTTP_PORT, "protocol": "TCP"}]}
    ]
    if nodes > 1:
        rules.append({"from": [{"podSelector": dict(selector)}], "ports": [{"protocol": "TCP"}]})
    return {"podSelector": dict(selector), "policyTypes": ["Ingress"], "ingress": rules}


def peer_problems(value: object) -> Iterator[Problem]:
    """Yield why this is not a list of NetworkPolicyPeers. The API server checks the contents of their selectors."""
    if not isinstance(value, Sequence) or isinstance(value, str):
        yield Problem(path="", message=f"must be a list of NetworkPolicyPeers, got {shown(value)}")
        return
    if not value:
        yield Problem(path="", message="must name at least one peer: an empty list would let everybody in")
    for number, peer in enumerate(value):
        where = f"[{number}]"
        if not isinstance(peer, Mapping) or not peer:
            yield Problem(path=where, message=f"must be a mapping with {_fields()}, got {shown(peer)}")
            continue
        for name in sorted(map(str, peer.keys() - _PEER_FIELDS)):
            yield Problem(path=f"{where}.{name}", message=f"unknown field; there are: {_fields()}")
        if "ipBlock" in peer and len(peer) > 1:
            yield Problem(path=where, message="has both ipBlock and selectors; make it two peers")


def _fields() -> str:
    return ", ".join(sorted(_PEER_FIELDS))


JSON = dict[str, object]

SERIES_LABEL = "quire_dev_llmdeployment"
"""Prometheus' form of the pods' label quire.dev/llmdeployment."""
_RATE, _UNBROKEN = "5m", "5m"
_LATE_FOR, _FULL_FOR = "5m", "15m"


def pod_monitor(options: Monitoring, *, selector: JSON) -> JSON:
    """Return the PodMonitor's spec. The target's labels (namespace, pod) override those of the page, as by default."""
    return {
        "selector": selector,
        "podTargetLabels": [LABEL_DEPLOYMENT],
        "podMetricsEndpoints": [
            {"port": engine.HTTP_PORT_NAME, "path": engine.METRICS_PATH, "interval": options.interval}
        ],
    }


def prometheus_rule(spec: Spec, options: Monitoring) -> JSON | None:
    """Return the PrometheusRule's spec, or None if the LLMDeployment has no targets to alert on."""
    if spec.autoscaling is None:
        return None
    rules = [
        _rule(spec, options, _first_token_high(spec, spec.autoscaling.targets.wait)),
        _rule(spec, options, _at_max_replicas(spec, spec.autoscaling)),
    ]
    return {"groups": [{"name": f"quire-{spec.name}", "rules": rules}]}


def _rule(spec: Spec, options: Monitoring, rule: JSON) -> JSON:
    annotations = rule["annotations"]
    assert isinstance(annotations, dict)
    runbook = f"{options.runbook_url.rstrip('/')}/{rule['alert']}.md"
    return {
        **rule,
        "labels": {"severity": "warning", "namespace": spec.namespace, "name": spec.name},
        "annotations": {**annotations, "runbook_url": runbook},
    }


def _first_token_high(spec: Spec, target: LatencyTarget) -> JSON:
    buckets = f"{engine.FIRST_TOKEN_WAIT_BUCKET}{_series(spec)}"
    quantile = f"histogram_quantile({target.percentile / 100:g}, sum by (le) (rate({buckets}[{_RATE}])))"
    threshold = format_duration(target.threshold_seconds)
    return {
        "alert": "QuireTimeToFirstTokenHigh",
        "expr": f"{quantile} > {target.threshold_seconds:g}",
        "for": _LATE_FOR,
        "annotations": {
            "summary": f"First tokens of {spec.namespace}/{spec.name} are late",
            "description": (
                f"{target.percentile} % of the requests should wait at most {threshold} after their own prefill "
                f"(spec.autoscaling.targets.firstTokenWait). In the last {_RATE} they waited up to "
                "{{ $value | humanizeDuration }}."
            ),
        },
    }


def _at_max_replicas(spec: Spec, autoscaling: Autoscaling) -> JSON:
    series, most = _series(spec), autoscaling.most_replicas
    # Aggregate by pod first, so that a replica scraped twice counts once.
    replicas = f"count(count by (pod) ({engine.RUNNING}{series}))"
    waiting = f"sum(max by (pod) (min_over_time({engine.WAITING}{series}[{_UNBROKEN}])))"
    return {
        "alert": "QuireAtMaxReplicas",
        "expr": f"{waiting} > 0 and {replicas} >= {most}",
        "for": _FULL_FOR,
        "annotations": {
            "summary": f"{spec.namespace}/{spec.name} needs more than its {most} replicas",
            "description": (
                f"The number of replicas is spec.autoscaling.maxReplicas ({most}). For {_FULL_FOR} at least "
                "{{ $value | humanize }} requests have been waiting."
            ),
        },
    }


def _series(spec: Spec) -> str:
    return f'{{namespace="{spec.namespace}",{SERIES_LABEL}="{spec.name}"}}'
