"""spec.autoscaling: between which bounds, by which targets and how fast replicas come and go."""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import TypedDict

from quire_common.quantities import format_duration
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


class PolicyType(StrEnum):
    PODS = "Pods"
    PERCENT = "Percent"


class SelectPolicy(StrEnum):
    MAX = "Max"
    """The policy that allows the largest change."""
    MIN = "Min"
    DISABLED = "Disabled"
    """No change in this direction."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepPolicy:
    """At most ``value`` replicas, or ``value`` percent of them, in each period."""

    type: PolicyType
    value: int
    period_seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class StepLimits:
    """How long a need must last, and how many replicas may then change at once; as ``behavior`` of an HPA says it."""

    window_seconds: float
    policies: tuple[StepPolicy, ...]
    select: SelectPolicy = SelectPolicy.MAX

    @property
    def longest_period_seconds(self) -> float:
        """Return for how long changes count towards a limit."""
        return max((policy.period_seconds for policy in self.policies), default=0.0)

    def __str__(self) -> str:
        """Return the limits to stand in a sentence after "at most"."""
        amounts = [f"{p.value}" if p.type is PolicyType.PODS else f"{p.value} %" for p in self.policies]
        periods = [format_duration(p.period_seconds) for p in self.policies]
        which = "larger" if self.select is SelectPolicy.MAX else "smaller"
        if len(set(periods)) == 1:
            several = f", the {which}," if len(amounts) > 1 else ""
            return f"{' or '.join(amounts)}{several} per {periods[0]}"
        each = " or ".join(f"{amount} per {period}" for amount, period in zip(amounts, periods, strict=True))
        return f"{each}, the {which}"


@dataclass(frozen=True, slots=True, kw_only=True)
class ScaleUp(StepLimits):
    """The limits on the way up. The first replica knows none."""

    @classmethod
    def steps(cls, *, window_seconds: float, max_percent: int, max_step: int, period_seconds: float) -> "ScaleUp":
        """Return the limits of ``autoscaling.scaleUp``: in each period the larger of percent and step."""
        values = ((PolicyType.PODS, max_step), (PolicyType.PERCENT, max_percent))
        return cls(window_seconds=window_seconds, policies=_policies(values, period_seconds))


@dataclass(frozen=True, slots=True, kw_only=True)
class ScaleDown(StepLimits):
    """The limits on the way down, where the need of the whole window must fit."""

    @classmethod
    def steps(cls, *, window_seconds: float, max_step: int, period_seconds: float) -> "ScaleDown":
        """Return the limits of ``autoscaling.scaleDown``; a step of 0 disables it."""
        return cls(
            window_seconds=window_seconds,
            policies=_policies(((PolicyType.PODS, max_step),), period_seconds),
            select=SelectPolicy.MAX if max_step else SelectPolicy.DISABLED,
        )


def _policies(values: Iterable[tuple[PolicyType, int]], period_seconds: float) -> tuple[StepPolicy, ...]:
    return tuple(StepPolicy(type=kind, value=value, period_seconds=period_seconds) for kind, value in values if value)


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
    schedules = _read_schedules(fields, least=minimum, most=maximum)
    may_reach_zero = minimum == 0 or any(schedule.min_replicas == 0 for schedule in schedules)
    up, down = _read_limits(fields, may_reach_zero=may_reach_zero)
    autoscaling = Autoscaling(
        mode=fields.choice("mode", AutoscalingMode, default=AutoscalingMode.ENFORCE),
        min_replicas=minimum,
        max_replicas=maximum,
        metrics_source=source if fields.has("metricsSource") else None,
        targets=_read_targets(fields.section("targets")),
        scale_up=up,
        scale_down=down,
        scale_to_zero=_read_scale_to_zero(fields.section("scaleToZero")),
        schedules=schedules,
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


_DEFAULT_UP = ScaleUp.steps(window_seconds=0.0, max_percent=100, max_step=4, period_seconds=15.0)
_DEFAULT_DOWN = ScaleDown.steps(window_seconds=300.0, max_step=1, period_seconds=60.0)


def _read_scale_up(fields: Fields) -> ScaleUp:
    percent, step = fields.integer("maxPercent", default=100), fields.integer("maxStep", default=4)
    rules = ScaleUp.steps(
        window_seconds=fields.duration("window", default=0.0),
        max_percent=percent,
        max_step=step,
        period_seconds=fields.duration("period", default=15.0, minimum=1.0),
    )
    if percent == 0 and step == 0:
        fields.problem("maxStep", "must be at least 1 while maxPercent is 0: otherwise no replica can be added")
    fields.done()
    return rules


def _read_scale_down(fields: Fields) -> ScaleDown:
    rules = ScaleDown.steps(
        window_seconds=fields.duration("window", default=300.0),
        max_step=fields.integer("maxStep", default=1),
        period_seconds=fields.duration("period", default=60.0, minimum=1.0),
    )
    fields.done()
    return rules


def _read_limits(fields: Fields, *, may_reach_zero: bool) -> tuple[ScaleUp, ScaleDown]:
    """Read the limits of both directions, each either in our words or in those of an HPA."""
    up, down = _read_scale_up(fields.section("scaleUp")), _read_scale_down(fields.section("scaleDown"))
    behavior = fields.section("behavior")
    for key, own, default in (("scaleUp", up, _DEFAULT_UP), ("scaleDown", down, _DEFAULT_DOWN)):
        # What the API server filled in says nothing.
        if behavior.has(key) and own != default:
            behavior.problem(key, f"limits the same as {fields.at(key)}; keep one, and set the other to null")
    if behavior.has("scaleUp"):
        section = behavior.section("scaleUp")
        up = ScaleUp(**_read_behavior(section, window_seconds=0.0, default=_HPA_UP))
        if up.select is SelectPolicy.DISABLED and may_reach_zero:
            section.problem("selectPolicy", "must not be Disabled while minReplicas is 0: no first replica could start")
    if behavior.has("scaleDown"):
        down = ScaleDown(**_read_behavior(behavior.section("scaleDown"), window_seconds=300.0, default=_HPA_DOWN))
    behavior.done()
    return up, down


_HPA_UP = _policies(((PolicyType.PODS, 4), (PolicyType.PERCENT, 100)), 15.0)
_HPA_DOWN = _policies(((PolicyType.PERCENT, 100),), 15.0)
_MAX_POLICIES = 10


class _Behavior(TypedDict):
    window_seconds: float
    policies: tuple[StepPolicy, ...]
    select: SelectPolicy


def _read_behavior(fields: Fields, *, window_seconds: float, default: tuple[StepPolicy, ...]) -> _Behavior:
    """Read one direction of an HPA's behavior, with the defaults of an HPA."""
    listed = fields.sections("policies")
    if fields.has("policies") and not 1 <= len(listed) <= _MAX_POLICIES:
        fields.problem("policies", f"must have between 1 and {_MAX_POLICIES} entries, got {len(listed)}")
    policies = tuple(_read_policy(each) for each in listed)
    window = fields.integer("stabilizationWindowSeconds", default=None, maximum=3600)
    select = fields.choice("selectPolicy", SelectPolicy, default=SelectPolicy.MAX)
    fields.done()
    return _Behavior(
        window_seconds=window_seconds if window is None else float(window), policies=policies or default, select=select
    )


def _read_policy(fields: Fields) -> StepPolicy:
    for key in ("type", "value", "periodSeconds"):
        if not fields.has(key):
            fields.problem(key, "is required")
    policy = StepPolicy(
        type=fields.choice("type", PolicyType, default=PolicyType.PODS),
        value=fields.integer("value", default=1, minimum=1),
        period_seconds=float(fields.integer("periodSeconds", default=60, minimum=1, maximum=1800)),
    )
    fields.done()
    return policy


def _read_scale_to_zero(fields: Fields) -> ScaleToZero:
    hold_timeout = fields.duration("holdTimeout", default=0.0, minimum=1.0, maximum=3600.0)
    rules = ScaleToZero(
        after_seconds=fields.duration("after", default=0.0),
        hold_timeout_seconds=hold_timeout if fields.has("holdTimeout") else None,
        max_held=fields.integer("maxHeld", default=None, minimum=1, maximum=100_000),
    )
    fields.done()
    return rules
