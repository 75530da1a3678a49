"""spec.autoscaling: between which bounds, by which targets and how fast replicas come and go."""

from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Annotated, ClassVar

from quire_operator.domain.resource.fields import Fields
from quire_operator.domain.resource.schema import Choice, Duration, Integer, Rule, Section, SectionList
from quire_operator.domain.resource.windows import RecurringWindow

_MAX_SCHEDULES = 16


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

    percentile: Annotated[
        int, Integer("Percentage of requests that must meet the threshold.", minimum=1, maximum=99)
    ] = 95
    threshold_seconds: Annotated[float, Duration("Maximum waiting time.", minimum=0.001, maximum=3600.0)] = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ScalingTargets:
    """The maximum load of one replica. Queue and KV bound the demand from below where a person sets them."""

    queue_depth: Annotated[
        int | None,
        Integer(
            "Target number of waiting requests per replica. If unset, only the measured demand is used.", minimum=1
        ),
    ] = None
    kv_usage_percent: Annotated[
        int | None,
        Integer(
            "Target KV cache usage per replica, in percent. If unset, only the measured demand is used.",
            minimum=1,
            maximum=100,
        ),
    ] = None
    time_to_first_token: Annotated[
        LatencyTarget,
        Section("Target for the time to first token, in addition to the computation of the request's own prompt."),
    ] = LatencyTarget()


@dataclass(frozen=True, slots=True, kw_only=True)
class ScaleUp:
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


@dataclass(frozen=True, slots=True, kw_only=True)
class ScaleDown:
    """At most ``max_step`` in each period, and only if the need of the whole window fits."""

    window_seconds: Annotated[
        float, Duration("How long the lower demand must persist before replicas are removed.")
    ] = 300.0
    max_step: Annotated[int, Integer("Maximum number of replicas removed per period. 0 disables scale-down.")] = 1
    period_seconds: Annotated[float, Duration("Length of the period for maxStep.", minimum=1.0)] = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ScaleToZero:
    """How the last replica goes, and how requests wait for the first one; used while ``min_replicas`` is 0."""

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
        Section("Maximum load per replica. The target that requires the most replicas determines the result."),
    ] = ScalingTargets()
    scale_to_zero: Annotated[
        ScaleToZero,
        Section(
            "How the last replica is removed, and how requests wait for the first one. Used while minReplicas is 0.",
            is_default_stored=False,
        ),
    ] = ScaleToZero()
    scale_up: Annotated[
        ScaleUp, Section("Scale-up limits. Each period allows the larger of maxPercent and maxStep.")
    ] = ScaleUp()
    scale_down: Annotated[ScaleDown, Section("Scale-down limits.")] = ScaleDown()
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

    def check(self, document: Fields) -> None:
        """Note each schedule whose bounds cross, possibly with a bound of autoscaling."""
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
