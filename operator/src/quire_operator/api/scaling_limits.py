"""The limits on a change of the number of replicas: ``scaleUp`` and ``scaleDown``, or ``behavior`` of an HPA."""

from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, ClassVar

from quire_common.quantities import format_duration
from quire_operator.api.field_kinds import Choice, Duration, Integer
from quire_operator.api.fields import Fields
from quire_operator.api.schema import JSON, Rule, Section, SectionList, read_section, section_schema


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

    type: PolicyType = Choice("Pods counts replicas. Percent is a share of the existing replicas.").required()
    value: int = Integer("Maximum change in one period.", minimum=1).required()
    period_seconds: float = Integer("Length of the period.", minimum=1, maximum=1800).required()


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

    window_seconds: float = Integer(
        "How long a higher demand must persist before replicas change. Default is 0.",
        maximum=3600,
        name="stabilizationWindowSeconds",
        is_default_stored=False,
    ).default(0.0)
    policies: tuple[StepPolicy, ...] = _Policies(
        "Limits per period. Default is 4 Pods and 100 Percent, each per 15 seconds."
    ).default(_policies(((PolicyType.PODS, 4), (PolicyType.PERCENT, 100)), 15.0))
    select: SelectPolicy = _SELECT.default(SelectPolicy.MAX)

    @classmethod
    def steps(cls, *, window_seconds: float, max_percent: int, max_step: int, period_seconds: float) -> "ScaleUp":
        """Return the limits of ``autoscaling.scaleUp``: in each period the larger of percent and step."""
        values = ((PolicyType.PODS, max_step), (PolicyType.PERCENT, max_percent))
        return cls(window_seconds=window_seconds, policies=_policies(values, period_seconds))


@dataclass(frozen=True, slots=True, kw_only=True)
class ScaleDown(StepLimits):
    """The limits on the way down, with the defaults of an HPA."""

    window_seconds: float = Integer(
        "How long a lower demand must persist before replicas change. Default is 300.",
        maximum=3600,
        name="stabilizationWindowSeconds",
        is_default_stored=False,
    ).default(300.0)
    policies: tuple[StepPolicy, ...] = _Policies("Limits per period. Default is 100 Percent per 15 seconds.").default(
        _policies(((PolicyType.PERCENT, 100),), 15.0)
    )
    select: SelectPolicy = _SELECT.default(SelectPolicy.MAX)

    @classmethod
    def steps(cls, *, window_seconds: float, max_step: int, period_seconds: float) -> "ScaleDown":
        """Return the limits of ``autoscaling.scaleDown``; a step of 0 disables it."""
        return cls(
            window_seconds=window_seconds,
            policies=_policies(((PolicyType.PODS, max_step),), period_seconds),
            select=SelectPolicy.MAX if max_step else SelectPolicy.DISABLED,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class ScaleUpSteps:
    """In each period at most the larger of ``max_percent`` of the replicas and ``max_step``."""

    window_seconds: float = Duration("How long the higher demand must persist before replicas are added.").default(0.0)
    max_percent: int = Integer(
        "Maximum number of replicas added per period, as a percentage of the existing replicas."
    ).default(100)
    max_step: int = Integer("Maximum number of replicas added per period.").default(4)
    period_seconds: float = Duration("Length of the period for maxPercent and maxStep.", minimum=1.0).default(15.0)

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
class ScaleDownSteps:
    """At most ``max_step`` in each period, and only if the need of the whole window fits."""

    window_seconds: float = Duration("How long the lower demand must persist before replicas are removed.").default(
        300.0
    )
    max_step: int = Integer("Maximum number of replicas removed per period. 0 disables scale-down.").default(1)
    period_seconds: float = Duration("Length of the period for maxStep.", minimum=1.0).default(60.0)

    @property
    def limits(self) -> ScaleDown:
        return ScaleDown.steps(
            window_seconds=self.window_seconds, max_step=self.max_step, period_seconds=self.period_seconds
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class StepsSection(Section):
    """A section with our own words for limits, read as limits in the words of an HPA."""

    section: type

    def schema(self, value_type: Any) -> JSON:
        return section_schema(self.section)

    def read(self, document: Fields, name: str, value_type: Any, default: Any) -> Any:
        return read_section(self.section, document.section(name)).limits


@dataclass(frozen=True, slots=True, kw_only=True)
class Behavior:
    scale_up: ScaleUp | None = Section("Limits of scale-up, in place of autoscaling.scaleUp.").default(None)
    scale_down: ScaleDown | None = Section("Limits of scale-down, in place of autoscaling.scaleDown.").default(None)
