"""``spec.autoscaling``: the bounds, targets and limits of the autoscaler."""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Annotated, Any, ClassVar

from quire_common.quantities import format_duration
from quire_operator.domain.resource.field_kinds import Choice, Duration, Integer
from quire_operator.domain.resource.fields import Fields
from quire_operator.domain.resource.scaling_targets import ScalingTargets
from quire_operator.domain.resource.schema import JSON, Rule, Section, SectionList, read_section, section_schema
from quire_operator.domain.resource.windows import RecurringWindow

_MAX_SCHEDULES = 16


class AutoscalingMode(StrEnum):
    ENFORCE = "Enforce"
    RECOMMEND = "Recommend"
    """Report decisions without applying them."""


class MetricsSource(StrEnum):
    PROMETHEUS = "Prometheus"
    PODS = "Pods"


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

    type: Annotated[PolicyType, Choice("Pods counts replicas. Percent is a share of the existing replicas.")]
    value: Annotated[int, Integer("Maximum change in one period.", minimum=1)]
    period_seconds: Annotated[float, Integer("Length of the period.", minimum=1, maximum=1800)]


def _policies(values: Iterable[tuple[PolicyType, int]], period_seconds: float) -> tuple[StepPolicy, ...]:
    return tuple(StepPolicy(type=kind, value=value, period_seconds=period_seconds) for kind, value in values if value)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Policies(SectionList):
    """The policies of one direction of an HPA's behavior."""

    item: str = "One limit."
    min_items: int = 1
    max_items: int = 10
    is_default_stored: bool = False


_SELECT = Choice(
    "Max applies the policy that allows the largest change, Min the one that allows the smallest. Disabled forbids "
    "changes in this direction.",
    name="selectPolicy",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class StepLimits:
    """The time that a demand must persist, and the number of replicas that may then change at once."""

    window_seconds: float
    policies: tuple[StepPolicy, ...]
    select: SelectPolicy

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
    """The limits on the way up, with the defaults of an HPA. They do not apply to the first replica."""

    window_seconds: Annotated[
        float,
        Integer(
            "How long the other demand must persist before replicas change. Default is 0.",
            maximum=3600,
            name="stabilizationWindowSeconds",
            is_default_stored=False,
        ),
    ] = 0.0
    policies: Annotated[
        tuple[StepPolicy, ...], _Policies("Limits per period. Default is 4 Pods and 100 Percent, each per 15 seconds.")
    ] = _policies(((PolicyType.PODS, 4), (PolicyType.PERCENT, 100)), 15.0)
    select: Annotated[SelectPolicy, _SELECT] = SelectPolicy.MAX

    @classmethod
    def steps(cls, *, window_seconds: float, max_percent: int, max_step: int, period_seconds: float) -> "ScaleUp":
        """Return the limits of ``autoscaling.scaleUp``: in each period the larger of percent and step."""
        values = ((PolicyType.PODS, max_step), (PolicyType.PERCENT, max_percent))
        return cls(window_seconds=window_seconds, policies=_policies(values, period_seconds))


@dataclass(frozen=True, slots=True, kw_only=True)
class ScaleDown(StepLimits):
    """The limits on the way down, with the defaults of an HPA."""

    window_seconds: Annotated[
        float,
        Integer(
            "How long the other demand must persist before replicas change. Default is 300.",
            maximum=3600,
            name="stabilizationWindowSeconds",
            is_default_stored=False,
        ),
    ] = 300.0
    policies: Annotated[
        tuple[StepPolicy, ...], _Policies("Limits per period. Default is 100 Percent per 15 seconds.")
    ] = _policies(((PolicyType.PERCENT, 100),), 15.0)
    select: Annotated[SelectPolicy, _SELECT] = SelectPolicy.MAX

    @classmethod
    def steps(cls, *, window_seconds: float, max_step: int, period_seconds: float) -> "ScaleDown":
        """Return the limits of ``autoscaling.scaleDown``; a step of 0 disables it."""
        return cls(
            window_seconds=window_seconds,
            policies=_policies(((PolicyType.PODS, max_step),), period_seconds),
            select=SelectPolicy.MAX if max_step else SelectPolicy.DISABLED,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class _ScaleUpSteps:
    """In each period at most the larger of ``max_percent`` of the replicas and ``max_step``."""

    window_seconds: Annotated[float, Duration("How long the higher demand must persist before replicas are added.")] = (
        0.0
    )
    max_percent: Annotated[
        int,
        Integer("Maximum number of replicas added per period, as a percentage of the existing replicas."),
    ] = 100
    max_step: Annotated[int, Integer("Maximum number of replicas added per period.")] = 4
    period_seconds: Annotated[float, Duration("Length of the period for maxPercent and maxStep.", minimum=1.0)] = 15.0

    RULES: ClassVar = (
        Rule(
            at="maxStep",
            cel="!has(self.maxPercent) || !has(self.maxStep) || self.maxPercent > 0 || self.maxStep > 0",
            holds=lambda rules, document: rules.max_percent > 0 or rules.max_step > 0,
            message="must be at least 1 while maxPercent is 0: otherwise no replica can be added",
        ),
    )

    @property
    def limits(self) -> ScaleUp:
        return ScaleUp.steps(
            window_seconds=self.window_seconds,
            max_percent=self.max_percent,
            max_step=self.max_step,
            period_seconds=self.period_seconds,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class _ScaleDownSteps:
    """At most ``max_step`` in each period, and only if the need of the whole window fits."""

    window_seconds: Annotated[
        float, Duration("How long the lower demand must persist before replicas are removed.")
    ] = 300.0
    max_step: Annotated[int, Integer("Maximum number of replicas removed per period. 0 disables scale-down.")] = 1
    period_seconds: Annotated[float, Duration("Length of the period for maxStep.", minimum=1.0)] = 60.0

    @property
    def limits(self) -> ScaleDown:
        return ScaleDown.steps(
            window_seconds=self.window_seconds, max_step=self.max_step, period_seconds=self.period_seconds
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Steps(Section):
    """A section with our own words for limits, read as limits in the words of an HPA."""

    section: type

    def schema(self, value_type: Any) -> JSON:
        return section_schema(self.section)

    def read(self, document: Fields, name: str, value_type: Any, default: Any) -> Any:
        return read_section(self.section, document.section(name)).limits


@dataclass(frozen=True, slots=True, kw_only=True)
class Behavior:
    """The ``behavior`` of an HPA."""

    scale_up: Annotated[ScaleUp | None, Section("Limits of scale-up, in place of autoscaling.scaleUp.")] = None
    scale_down: Annotated[ScaleDown | None, Section("Limits of scale-down, in place of autoscaling.scaleDown.")] = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ScaleToZero:
    """The removal of the last replica and the wait for the first one; used if ``min_replicas`` is 0."""

    after_seconds: Annotated[
        float,
        Duration(
            "Time without requests before the last replica is removed, for models that start slowly. It is at least "
            "scaleDown.window.",
            is_default_stored=False,
        ),
    ] = 0.0
    hold_timeout_seconds: Annotated[
        float | None,
        Duration(
            "Maximum time that the gateway holds a request until a replica is ready. Default follows the measured "
            "start-up time of this model.",
            minimum=1.0,
            maximum=3600.0,
        ),
    ] = None
    max_held: Annotated[
        int | None,
        Integer(
            "Maximum number of requests for this model that one gateway holds. Default is the gateway's own limit for "
            "all models.",
            minimum=1,
            maximum=100_000,
        ),
    ] = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule(RecurringWindow):
    """Other bounds while a window is open; None is the bound of autoscaling."""

    min_replicas: Annotated[
        int | None,
        Integer("Minimum number of replicas while the window is open. Default is autoscaling.minReplicas."),
    ] = None
    max_replicas: Annotated[
        int | None,
        Integer("Maximum number of replicas while the window is open. Default is autoscaling.maxReplicas.", minimum=1),
    ] = None

    RULES: ClassVar = (
        Rule(
            at="minReplicas",
            cel="has(self.minReplicas) || has(self.maxReplicas)",
            holds=lambda schedule, document: document.has("minReplicas") or document.has("maxReplicas"),
            message="is required, unless maxReplicas is set",
        ),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Autoscaling:
    mode: Annotated[
        AutoscalingMode, Choice("Enforce applies scaling decisions. Recommend only records and explains them.")
    ] = AutoscalingMode.ENFORCE
    min_replicas: Annotated[
        int,
        Integer(
            "Minimum number of replicas. With 0, an idle deployment has no replicas; the gateway queues the first "
            "requests until a replica is ready."
        ),
    ] = 1
    max_replicas: Annotated[int, Integer("Maximum number of replicas.", minimum=1)]
    metrics_source: Annotated[
        MetricsSource | None,
        Choice(
            "Source of the engine metrics. Pods scrapes the replicas directly. Default is Prometheus if the operator "
            "has a Prometheus address, otherwise Pods."
        ),
    ] = None
    targets: Annotated[
        ScalingTargets,
        Section(
            "Maximum load per replica. The target that requires the most replicas determines the result.",
            is_default_stored=False,
        ),
    ] = ScalingTargets()
    scale_to_zero: Annotated[
        ScaleToZero,
        Section(
            "How the last replica is removed, and how requests wait for the first one. Used while minReplicas is 0.",
            is_default_stored=False,
        ),
    ] = ScaleToZero()
    scale_up: Annotated[
        ScaleUp,
        _Steps("Scale-up limits. Each period allows the larger of maxPercent and maxStep.", section=_ScaleUpSteps),
    ] = _ScaleUpSteps().limits
    scale_down: Annotated[ScaleDown, _Steps("Scale-down limits.", section=_ScaleDownSteps)] = _ScaleDownSteps().limits
    behavior: Annotated[
        Behavior,
        Section(
            "The limits of scaleUp and scaleDown in the words of a HorizontalPodAutoscaler, whose defaults then apply. "
            "Each direction is set either here or in scaleUp and scaleDown.",
            is_default_stored=False,
        ),
    ] = Behavior()
    schedules: Annotated[
        tuple[Schedule, ...],
        SectionList(
            "Other bounds at recurring times. If several windows are open, the first schedule in the list wins. "
            "Replicas for a higher minimum start early enough to be ready when the window opens.",
            item="Bounds that replace those of autoscaling while a window is open.",
            max_items=_MAX_SCHEDULES,
        ),
    ] = ()

    RULES: ClassVar = (
        Rule(
            at="maxReplicas",
            cel="self.minReplicas <= self.maxReplicas",
            holds=lambda bounds, document: bounds.min_replicas <= bounds.max_replicas,
            message="must be at least minReplicas",
        ),
        Rule(
            at="schedules",  # The parser has ``check`` for it, whose messages name the entry.
            cel="!has(self.schedules) || self.schedules.all(s, (has(s.minReplicas) ? s.minReplicas : self.minReplicas) "
            "<= (has(s.maxReplicas) ? s.maxReplicas : self.maxReplicas))",
            message="maxReplicas must be at least minReplicas in each schedule",
        ),
    )

    @property
    def resolved(self) -> "Autoscaling":
        """Return the same rules with the limits of ``behavior`` in place of those that it replaces."""
        up, down = self.behavior.scale_up or self.scale_up, self.behavior.scale_down or self.scale_down
        return replace(self, scale_up=up, scale_down=down, behavior=Behavior())

    def check(self, document: Fields) -> None:
        """Note limits in both words, limits that keep the model at zero, and schedules whose bounds cross."""
        behavior = document.section("behavior")
        pairs = (
            ("scaleUp", self.behavior.scale_up, self.scale_up, _ScaleUpSteps().limits),
            ("scaleDown", self.behavior.scale_down, self.scale_down, _ScaleDownSteps().limits),
        )
        for name, other, own, default in pairs:
            if other is not None and own != default:  # What the API server filled in says nothing.
                text = f"limits the same as {document.at(name)}; keep one, and set the other to null"
                behavior.problem(name, text)
        up = self.behavior.scale_up
        if up is not None and up.select is SelectPolicy.DISABLED and self.may_reach_zero:
            text = "must not be Disabled while minReplicas is 0: no first replica could start"
            behavior.problem("scaleUp.selectPolicy", text)
        self._check_schedules(document)

    def _check_schedules(self, document: Fields) -> None:
        entries = document.sections("schedules", at_most=_MAX_SCHEDULES)
        for schedule, entry in zip(self.schedules, entries, strict=True):
            least, most = self.bounds_of(schedule)
            if least <= most:
                continue
            if schedule.max_replicas is None:
                text = f"must be at most spec.autoscaling.maxReplicas ({most}), got {least}"
                entry.problem("minReplicas", f"{text}; or set maxReplicas here too")
            else:
                whose = "spec.autoscaling.minReplicas" if schedule.min_replicas is None else "minReplicas"
                remedy = "; or set minReplicas here too" if schedule.min_replicas is None else ""
                entry.problem("maxReplicas", f"must be at least {whose} ({least}), got {most}{remedy}")

    def within(self, min_replicas: int, max_replicas: int) -> "Autoscaling":
        """Return the same rules with these bounds."""
        return replace(self, min_replicas=min_replicas, max_replicas=max_replicas)

    def bounds_of(self, schedule: Schedule) -> tuple[int, int]:
        """Return the fewest and the most replicas while this schedule is in force."""
        least = self.min_replicas if schedule.min_replicas is None else schedule.min_replicas
        return least, self.max_replicas if schedule.max_replicas is None else schedule.max_replicas

    @property
    def may_reach_zero(self) -> bool:
        """True if the last replica may be removed at some time."""
        return self.fewest_replicas == 0

    @property
    def fewest_replicas(self) -> int:
        """The fewest replicas at any time."""
        return min((self.min_replicas, *(self.bounds_of(schedule)[0] for schedule in self.schedules)))

    @property
    def most_replicas(self) -> int:
        """The most replicas at any time."""
        return max((self.max_replicas, *(self.bounds_of(schedule)[1] for schedule in self.schedules)))
