"""Our own policy in the product: ``domain.autoscaler.decide``, a tick each 15 s, with pods scraped at the tick.

That is ``metricsSource: Pods``, the default. ``scrape_seconds`` 15 gives the view of a Prometheus.
"""

from dataclasses import dataclass

from quire_cli.simulation.fleet import QuireScaler
from quire_operator.domain.autoscaling.decision_context import Policy
from quire_operator.domain.autoscaling.tuning import Tuning
from quire_operator.domain.resource.scaling import Autoscaling, AutoscalingMode
from quire_operator.domain.resource.scaling_limits import ScaleDown, ScaleUp
from quire_operator.domain.resource.scaling_targets import LatencyTarget, ScalingTargets


@dataclass(frozen=True, slots=True, kw_only=True)
class QuireConfig:
    """The settings of ``spec.autoscaling``, and the policy's constants."""

    percentile: int = 95
    threshold_seconds: float = 1.0
    up_max_step: int = 4
    down_window_seconds: float = 300.0
    down_max_step: int = 1
    down_period_seconds: float = 60.0
    scrape_seconds: float = 0.0
    tuning: Tuning = Tuning()


def quire_scaler(config: QuireConfig, *, max_sequences: int, minimum: int, maximum: int) -> QuireScaler:
    rules = Autoscaling(
        mode=AutoscalingMode.ENFORCE,
        min_replicas=minimum,
        max_replicas=maximum,
        metrics_source=None,
        targets=ScalingTargets(
            queue_depth=None,
            kv_usage_percent=None,
            first_token_wait=LatencyTarget(percentile=config.percentile, threshold_seconds=config.threshold_seconds),
        ),
        scale_up=ScaleUp.steps(
            window_seconds=0.0,
            max_percent=100,
            max_step=config.up_max_step,
            period_seconds=15.0,
        ),
        scale_down=ScaleDown.steps(
            window_seconds=config.down_window_seconds,
            max_step=config.down_max_step,
            period_seconds=config.down_period_seconds,
        ),
    )
    policy = Policy(autoscaling=rules, max_sequences=max_sequences, tuning=config.tuning)
    return QuireScaler(policy, scrape_seconds=config.scrape_seconds)
