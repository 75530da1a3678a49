"""The PodMonitor of one LLMDeployment, and the PrometheusRule with alerts on the targets of its spec.

Pure; part of ``desired``. The chart has the alerts that are the same for every LLMDeployment. The names and buckets are
the engine's own (``engine_metrics``); tests/contract runs the alerts in a real Prometheus.
"""

from quire_common.contract import engine
from quire_common.quantities import format_duration
from quire_operator.domain.manifests.cluster_features import Monitoring
from quire_operator.domain.resource import Autoscaling, LatencyTarget, Spec
from quire_operator.domain.resource.names import LABEL_DEPLOYMENT

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
