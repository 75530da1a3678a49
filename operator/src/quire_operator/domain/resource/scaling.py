"""``spec.autoscaling``: the bounds of the autoscaler, at set times too, and the sections of its targets and limits."""

from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Annotated, ClassVar

from quire_operator.domain.resource.field_kinds import Choice, Duration, Integer
from quire_operator.domain.resource.fields import Fields
from quire_operator.domain.resource.scaling_limits import (
    Behavior,
    ScaleDown,
    ScaleDownSteps,
    ScaleUp,
    ScaleUpSteps,
    SelectPolicy,
    StepsSection,
)
from quire_operator.domain.resource.scaling_targets import ScalingTargets
from quire_operator.domain.resource.schema import Rule, Section, SectionList
from quire_operator.domain.resource.windows import RecurringWindow

_MAX_SCHEDULES = 16


class AutoscalingMode(StrEnum):
    ENFORCE = "Enforce"
    RECOMMEND = "Recommend"
    """Report decisions without applying them."""


class MetricsSource(StrEnum):
    PROMETHEUS = "Prometheus"
    PODS = "Pods"


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
        StepsSection("Scale-up limits. Each period allows the larger of maxPercent and maxStep.", section=ScaleUpSteps),
    ] = ScaleUpSteps().limits
    scale_down: Annotated[ScaleDown, StepsSection("Scale-down limits.", section=ScaleDownSteps)] = (
        ScaleDownSteps().limits
    )
    behavior: Annotated[
        Behavior,
        Section(
            "The limits of scaleUp and scaleDown in the form of a HorizontalPodAutoscaler, whose defaults then apply. "
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
            ("scaleUp", self.behavior.scale_up, self.scale_up, ScaleUpSteps().limits),
            ("scaleDown", self.behavior.scale_down, self.scale_down, ScaleDownSteps().limits),
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
