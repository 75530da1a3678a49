"""spec.autoscaling: between which bounds, by which targets and how fast replicas come and go."""

from dataclasses import dataclass, replace
from enum import StrEnum

from quire_operator.domain.resource.fields import Fields
from quire_operator.domain.resource.windows import RecurringWindow, read_window

MAX_SCHEDULES = 16


class AutoscalingMode(StrEnum):
    ENFORCE = "Enforce"
    RECOMMEND = "Recommend"
    """Decide and explain, change nothing."""


class MetricsSource(StrEnum):
    PROMETHEUS = "Prometheus"
    PODS = "Pods"


@dataclass(frozen=True, slots=True, kw_only=True)
class LatencyTarget:
    """``percentile`` of the first tokens wait at most ``threshold_seconds`` beyond their own prefill."""

    percentile: int
    threshold_seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class ScalingTargets:
    """What one replica should carry at most. Queue and KV bound the need from below where a person sets them."""

    queue_depth: int | None
    kv_usage_percent: int | None
    time_to_first_token: LatencyTarget


@dataclass(frozen=True, slots=True, kw_only=True)
class ScaleUp:
    """In each period at most the larger of ``max_percent`` of the replicas and ``max_step``."""

    window_seconds: float
    max_percent: int
    max_step: int
    period_seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class ScaleDown:
    """At most ``max_step`` in each period, and only if the need of the whole window fits."""

    window_seconds: float
    max_step: int
    period_seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class ScaleToZero:
    """How the last replica goes, and how requests wait for the first one; used while ``min_replicas`` is 0."""

    after_seconds: float = 0.0
    """Without a request, in addition to the window of scale-down."""
    hold_timeout_seconds: float | None = None
    """None: the gateway derives it from the learned start-up time."""
    max_held: int | None = None
    """None: the limit of the gateway alone."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """Other bounds while a window is open."""

    window: RecurringWindow
    min_replicas: int | None
    """None: as outside the window."""
    max_replicas: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Autoscaling:
    mode: AutoscalingMode
    min_replicas: int
    """0: to none while nobody asks; the gateways hold the first requests."""
    max_replicas: int
    metrics_source: MetricsSource | None
    """None: Prometheus where the operator has one set, else the pods themselves."""
    targets: ScalingTargets
    scale_up: ScaleUp
    scale_down: ScaleDown
    scale_to_zero: ScaleToZero = ScaleToZero()
    schedules: tuple[Schedule, ...] = ()
    """Of those whose windows are open, the first wins as a whole."""

    def within(self, min_replicas: int, max_replicas: int) -> "Autoscaling":
        """Return the same rules with these bounds."""
        return replace(self, min_replicas=min_replicas, max_replicas=max_replicas)

    def bounds_of(self, schedule: Schedule) -> tuple[int, int]:
        """Return the fewest and the most replicas while this schedule is in force."""
        least = self.min_replicas if schedule.min_replicas is None else schedule.min_replicas
        return least, self.max_replicas if schedule.max_replicas is None else schedule.max_replicas

    @property
    def may_reach_zero(self) -> bool:
        """Whether the last replica may go at some time."""
        return self.fewest_replicas == 0

    @property
    def fewest_replicas(self) -> int:
        """The fewest replicas at any time."""
        return min((self.min_replicas, *(self.bounds_of(schedule)[0] for schedule in self.schedules)))

    @property
    def most_replicas(self) -> int:
        """The most replicas at any time."""
        return max((self.max_replicas, *(self.bounds_of(schedule)[1] for schedule in self.schedules)))


def read_autoscaling(fields: Fields) -> Autoscaling:
    minimum = fields.integer("minReplicas", default=1)
    if not fields.has("maxReplicas"):
        fields.problem("maxReplicas", "is required")
    maximum = fields.integer("maxReplicas", default=max(1, minimum))
    if maximum < minimum:
        fields.problem("maxReplicas", f"must be >= minReplicas ({minimum}), got {maximum}")
    elif maximum == 0:
        fields.problem("maxReplicas", "must be >= 1, got 0")
    source = fields.choice("metricsSource", MetricsSource, default=MetricsSource.PODS)
    autoscaling = Autoscaling(
        mode=fields.choice("mode", AutoscalingMode, default=AutoscalingMode.ENFORCE),
        min_replicas=minimum,
        max_replicas=maximum,
        metrics_source=source if fields.has("metricsSource") else None,
        targets=_read_targets(fields.section("targets")),
        scale_up=_read_scale_up(fields.section("scaleUp")),
        scale_down=_read_scale_down(fields.section("scaleDown")),
        scale_to_zero=_read_scale_to_zero(fields.section("scaleToZero")),
        schedules=_read_schedules(fields, least=minimum, most=maximum),
    )
    fields.done()
    return autoscaling


def _read_schedules(fields: Fields, *, least: int, most: int) -> tuple[Schedule, ...]:
    found: list[Schedule] = []
    listed = fields.sections("schedules")
    if len(listed) > MAX_SCHEDULES:
        fields.problem("schedules", f"must have at most {MAX_SCHEDULES} entries, got {len(listed)}")
    for each in listed:
        window = read_window(each)
        minimum = each.integer("minReplicas", default=None)
        maximum = each.integer("maxReplicas", default=None, minimum=1)
        if not each.has("minReplicas") and not each.has("maxReplicas"):
            each.problem("minReplicas", "is required, unless maxReplicas is set: the schedule would change nothing")
        elif (lower := least if minimum is None else minimum) > (upper := most if maximum is None else maximum):
            if maximum is None:
                most_text = f"must be at most spec.autoscaling.maxReplicas ({upper}), got {lower}"
                each.problem("minReplicas", f"{most_text}; or set maxReplicas here too")
            else:
                whose = "spec.autoscaling.minReplicas" if minimum is None else "minReplicas"
                remedy = "; or set minReplicas here too" if minimum is None else ""
                each.problem("maxReplicas", f"must be at least {whose} ({lower}), got {upper}{remedy}")
        each.done()
        if window is not None:
            found.append(Schedule(window=window, min_replicas=minimum, max_replicas=maximum))
    return tuple(found)


def _read_targets(fields: Fields) -> ScalingTargets:
    latency = fields.section("timeToFirstToken")
    targets = ScalingTargets(
        queue_depth=fields.integer("queueDepth", default=None, minimum=1),
        kv_usage_percent=fields.integer("kvUsagePercent", default=None, minimum=1, maximum=100),
        time_to_first_token=LatencyTarget(
            percentile=latency.integer("percentile", default=95, minimum=1, maximum=99),
            threshold_seconds=latency.duration("threshold", default=1.0, minimum=0.001, maximum=3600.0),
        ),
    )
    latency.done()
    fields.done()
    return targets


def _read_scale_up(fields: Fields) -> ScaleUp:
    rules = ScaleUp(
        window_seconds=fields.duration("window", default=0.0),
        max_percent=fields.integer("maxPercent", default=100),
        max_step=fields.integer("maxStep", default=4),
        period_seconds=fields.duration("period", default=15.0, minimum=1.0),
    )
    if rules.max_percent == 0 and rules.max_step == 0:
        fields.problem("maxStep", "must be at least 1 while maxPercent is 0: otherwise no replica can be added")
    fields.done()
    return rules


def _read_scale_down(fields: Fields) -> ScaleDown:
    rules = ScaleDown(
        window_seconds=fields.duration("window", default=300.0),
        max_step=fields.integer("maxStep", default=1),
        period_seconds=fields.duration("period", default=60.0, minimum=1.0),
    )
    fields.done()
    return rules


def _read_scale_to_zero(fields: Fields) -> ScaleToZero:
    hold_timeout = fields.duration("holdTimeout", default=0.0, minimum=1.0, maximum=3600.0)
    rules = ScaleToZero(
        after_seconds=fields.duration("after", default=0.0),
        hold_timeout_seconds=hold_timeout if fields.has("holdTimeout") else None,
        max_held=fields.integer("maxHeld", default=None, minimum=1, maximum=100_000),
    )
    fields.done()
    return rules
