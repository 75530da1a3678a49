"""``spec.rollout.canary``: the steps of a canary, the gates that judge it, and what happens when one fails."""

import re
from dataclasses import dataclass
from enum import StrEnum
from math import ceil
from typing import Annotated, Any, ClassVar

from quire_operator.domain.resource.fields import Fields, shown
from quire_operator.domain.resource.schema import JSON, Choice, Duration, Integer, Kind, Rule, SectionList

_MAX_STEPS, _MAX_GATES, _MAX_WEIGHT = 10, 8, 90
_LEAST_RELATIVE_LOAD = 0.1
"""A canary replica with a smaller share of a stable replica's load would be idle, so that its latency says nothing."""


class GateMetric(StrEnum):
    TIME_TO_FIRST_TOKEN = "TimeToFirstToken"
    INTER_TOKEN_LATENCY = "InterTokenLatency"
    ERROR_RATE = "ErrorRate"


class OnFailure(StrEnum):
    ROLLBACK = "Rollback"
    PAUSE = "Pause"
    """The canary gets no more requests, and its replicas stay for inspection."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Percent(Kind):
    """A percentage as a whole number or as a decimal in a string, read as a float."""

    maximum: float = 100.0

    def schema(self, value_type: Any) -> JSON:
        rule = Rule(
            cel="type(self) == int ? self >= 0 && self <= 100 : self.matches('^(100|[1-9]?[0-9]([.][0-9]{1,3})?)$')",
            message='must be a percentage up to 100, such as 1 or "0.5"',
        )
        either = [{"type": "integer"}, {"type": "string"}]
        rules = {"x-kubernetes-validations": [rule.schema]}
        return {"x-kubernetes-int-or-string": True, "anyOf": either, "maxLength": 10, **rules}

    def read(self, document: Fields, name: str, value_type: Any, default: Any) -> Any:
        if not document.has(name):
            return default
        value = document.raw(name)
        if isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= self.maximum:
            return float(value)
        if isinstance(value, str) and re.fullmatch(r"100|[1-9]?[0-9]([.][0-9]{1,3})?", value):
            return float(value)
        document.problem(name, f'must be a percentage up to 100, such as 1 or "0.5", got {shown(value)}')
        return default


@dataclass(frozen=True, slots=True, kw_only=True)
class CanaryStep:
    weight_percent: Annotated[
        int,
        Integer(
            "Share of the requests that the canary gets in this step.",
            minimum=1,
            maximum=_MAX_WEIGHT,
            example="a whole number from 1 to 90",
        ),
    ]
    duration_seconds: Annotated[
        float,
        Duration(
            "Minimum time of this step. It lasts longer if there are fewer than minRequests requests.",
            minimum=10.0,
            maximum=30 * 86_400.0,
            example='a duration such as "30m" or "72h"',
        ),
    ]


@dataclass(frozen=True, slots=True, kw_only=True)
class Gate:
    metric: Annotated[
        GateMetric,
        Choice(
            "What is compared: TimeToFirstToken and InterTokenLatency at equal load, ErrorRate over all requests.",
            example="TimeToFirstToken, InterTokenLatency or ErrorRate",
        ),
    ]
    percentile: Annotated[
        int | None,
        Integer("Percentile of a latency. Default is 95.", minimum=50, maximum=99),
    ] = None
    max_increase_percent: Annotated[
        int | None,
        Integer(
            "By how much the canary's latency may exceed the stable revision's at equal load. Default is 15.",
            minimum=1,
            maximum=1000,
        ),
    ] = None
    max_percent: Annotated[
        float | None,
        Percent(
            "Error rate that the canary may have. A higher rate of the stable revision is its limit instead. Default "
            'is "0.5".',
        ),
    ] = None

    RULES: ClassVar = (
        Rule(
            cel="self.metric != 'ErrorRate' || (!has(self.percentile) && !has(self.maxIncreasePercent))",
            holds=lambda gate, document: (
                gate.metric is not GateMetric.ERROR_RATE
                or (gate.percentile is None and gate.max_increase_percent is None)
            ),
            message="metric ErrorRate has no percentile and no maxIncreasePercent: set maxPercent instead",
        ),
        Rule(
            cel="self.metric == 'ErrorRate' || !has(self.maxPercent)",
            holds=lambda gate, document: gate.metric is GateMetric.ERROR_RATE or gate.max_percent is None,
            message="maxPercent is for metric ErrorRate: set percentile and maxIncreasePercent for a latency",
        ),
    )

    @property
    def share(self) -> float:
        """The percentile as a share in (0, 1)."""
        return (self.percentile or 95) / 100

    @property
    def factor(self) -> float:
        """The largest allowed ratio of the canary's latency to the stable revision's."""
        return 1.0 + (self.max_increase_percent or 15) / 100

    @property
    def error_limit(self) -> float:
        """The allowed share of failed requests."""
        return (0.5 if self.max_percent is None else self.max_percent) / 100

    def __str__(self) -> str:
        return self.metric.value if self.metric is GateMetric.ERROR_RATE else f"{self.metric} p{self.percentile or 95}"


DEFAULT_STEPS = tuple(CanaryStep(weight_percent=weight, duration_seconds=600.0) for weight in (10, 25, 50))
DEFAULT_GATES = tuple(Gate(metric=metric) for metric in GateMetric)


@dataclass(frozen=True, slots=True, kw_only=True)
class Canary:
    steps: Annotated[
        tuple[CanaryStep, ...],
        SectionList(
            "Rising shares of the requests for the canary. After the last step it is promoted. Default is 10, 25 and "
            "50 %, 10 minutes each.",
            item="A step.",
            min_items=1,
            max_items=_MAX_STEPS,
            is_default_stored=False,
            rules=(
                Rule(
                    cel="self.map(step, step.weightPercent).isSorted() "
                    "&& self.all(step, self.filter(other, other.weightPercent == step.weightPercent).size() == 1)",
                    message="the weights must rise from step to step",
                ),
            ),
        ),
    ] = DEFAULT_STEPS
    gates: Annotated[
        tuple[Gate, ...],
        SectionList(
            "The comparisons with the stable revision that the canary must pass. Default is TimeToFirstToken p95 and "
            "InterTokenLatency p95 within 15 %, and an ErrorRate of at most 0.5 %.",
            item="A gate.",
            min_items=1,
            max_items=_MAX_GATES,
            is_default_stored=False,
        ),
    ] = DEFAULT_GATES
    min_requests: Annotated[
        int,
        Integer(
            "No gate is judged from fewer requests of the canary. Restarts and failed starts of its replicas are.",
            minimum=50,
            maximum=1_000_000,
        ),
    ] = 500
    on_failure: Annotated[
        OnFailure,
        Choice(
            "Rollback removes a canary that fails. Pause stops its requests and keeps its replicas for inspection.",
        ),
    ] = OnFailure.ROLLBACK

    def check(self, document: Fields) -> None:
        """Note weights that do not rise."""
        for place, (before, step) in enumerate(zip(self.steps, self.steps[1:], strict=False), start=1):
            if step.weight_percent <= before.weight_percent:
                document.problem(
                    f"steps[{place}].weightPercent",
                    f"must be above {before.weight_percent}, the weight of the step before, got {step.weight_percent}; "
                    "order the steps by rising weights",
                )

    def too_few(self, replicas: int) -> tuple[int, str] | None:
        """Return the step whose canary would be nearly idle with so many stable replicas, and what to do; or None."""
        for place, step in enumerate(self.steps):
            if replicas and relative_load(step.weight_percent, replicas) < _LEAST_RELATIVE_LOAD:
                return place, (
                    f"is too small for {replicas} replica{'s' if replicas > 1 else ''}: a canary replica would have "
                    f"{100 * relative_load(step.weight_percent, replicas):.0f} % of a stable replica's load, and its "
                    f"latency would say nothing. Set at least {_least_weight(replicas)}, or more replicas"
                )
        return None


def canary_replicas(weight_percent: int, stable_replicas: int) -> int:
    """Return how many replicas the canary needs, so that none has more load than a stable one would have alone."""
    return ceil(weight_percent * stable_replicas / 100)


def relative_load(weight_percent: int, stable_replicas: int) -> float:
    """Return the load of a canary replica as a multiple of a stable replica's."""
    count = canary_replicas(weight_percent, stable_replicas)
    return weight_percent * stable_replicas / (count * (100 - weight_percent))


def _least_weight(replicas: int) -> int:
    weights = range(1, _MAX_WEIGHT + 1)
    return next(weight for weight in weights if relative_load(weight, replicas) >= _LEAST_RELATIVE_LOAD)
