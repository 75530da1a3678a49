"""spec.rollout and spec.drain: how replicas are replaced, also by strategy Canary."""

import re
from dataclasses import dataclass
from enum import StrEnum
from math import ceil
from typing import Any, ClassVar

from quire_common.contract.gateway import EQUAL_LOAD
from quire_operator.api.field_kinds import Choice, CountOrPercent, Duration, Integer
from quire_operator.api.fields import Fields, shown
from quire_operator.api.schema import JSON, Kind, Removed, Rule, Section, SectionList

_MAX_STEPS, _MAX_GATES, _MAX_WEIGHT = 10, 8, 90
_MOST_REQUESTS = 40
"""The default of maxRequests, as a multiple of minRequests."""
_ANSWER_SAMPLE_PERCENT = 10.0


class GateMetric(StrEnum):
    TIME_TO_FIRST_TOKEN = "TimeToFirstToken"
    INTER_TOKEN_LATENCY = "InterTokenLatency"
    ERROR_RATE = "ErrorRate"
    ANSWERS = "Answers"
    """The share of sampled requests with temperature 0 that both tracks answer differently."""


LATENCIES = frozenset({GateMetric.TIME_TO_FIRST_TOKEN, GateMetric.INTER_TOKEN_LATENCY})


class OnFailure(StrEnum):
    ROLLBACK = "Rollback"
    PAUSE = "Pause"
    """The canary gets no more requests, and its replicas stay for inspection."""


class OnInconclusive(StrEnum):
    ESTIMATE = "Estimate"
    """A gate passes if the canary's figure is within the limit, and fails otherwise, also without one."""
    FAIL = "Fail"
    PASS = "Pass"


@dataclass(frozen=True, slots=True, kw_only=True)
class Percent(Kind):
    """A percentage as a whole number or as a decimal in a string, read as a float."""

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
        if isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= 100:
            return float(value)
        if isinstance(value, str) and re.fullmatch(r"100|[1-9]?[0-9]([.][0-9]{1,3})?", value):
            return float(value)
        document.problem(name, f'must be a percentage up to 100, such as 1 or "0.5", got {shown(value)}')
        return default


@dataclass(frozen=True, slots=True, kw_only=True)
class CanaryStep:
    weight_percent: int = Integer(
        "Largest share of the requests that the canary gets in this step. It is lowered so that a replica of the "
        "canary gets as many requests as a stable one.",
        minimum=1,
        maximum=_MAX_WEIGHT,
        example="a whole number from 1 to 90",
    ).required()
    duration_seconds: float = Duration(
        "Minimum time of this step. It lasts longer if there are fewer than minRequests requests.",
        minimum=10.0,
        maximum=30 * 86_400.0,
        example='a duration such as "30m" or "72h"',
    ).required()


@dataclass(frozen=True, slots=True, kw_only=True)
class Gate:
    metric: GateMetric = Choice(
        "What is compared: TimeToFirstToken and InterTokenLatency while a replica of the canary has the load of a "
        "stable one, ErrorRate over all requests. "
        "Answers repeats a sample of the requests with temperature 0 on both tracks and compares the tokens and "
        "their logprobs: use it only where the gateway may keep prompts in memory for a moment.",
        example="TimeToFirstToken, InterTokenLatency, ErrorRate or Answers",
    ).required()
    percentile: int | None = Integer("Percentile of a latency. Default is 95.", minimum=50, maximum=99).default(None)
    max_increase_percent: int | None = Integer(
        "By how much the canary's latency may exceed the stable revision's. Default is 15.", minimum=1, maximum=1000
    ).default(None)
    max_percent: float | None = Percent(
        "ErrorRate: the error rate that the canary may have; a higher rate of the stable revision is its limit "
        'instead. Default is "0.5". Answers: the share of compared answers that may differ. Default is 1.'
    ).default(None)

    RULES: ClassVar = (
        Rule(
            cel="!(self.metric in ['ErrorRate', 'Answers']) "
            "|| (!has(self.percentile) && !has(self.maxIncreasePercent))",
            holds=lambda gate, document: (
                gate.metric in LATENCIES or (gate.percentile is None and gate.max_increase_percent is None)
            ),
            message="metrics ErrorRate and Answers have no percentile and no maxIncreasePercent: set maxPercent "
            "instead",
        ),
        Rule(
            cel="self.metric in ['ErrorRate', 'Answers'] || !has(self.maxPercent)",
            holds=lambda gate, document: gate.metric not in LATENCIES or gate.max_percent is None,
            message="maxPercent is for metrics ErrorRate and Answers: set percentile and maxIncreasePercent for a "
            "latency",
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
        """The allowed share of failed requests, or of different answers."""
        default = 1.0 if self.metric is GateMetric.ANSWERS else 0.5
        return (default if self.max_percent is None else self.max_percent) / 100

    def __str__(self) -> str:
        return f"{self.metric} p{self.percentile or 95}" if self.metric in LATENCIES else self.metric.value


DEFAULT_STEPS = tuple(CanaryStep(weight_percent=weight, duration_seconds=600.0) for weight in (10, 25, 50))
DEFAULT_GATES = tuple(Gate(metric=metric) for metric in GateMetric if metric is not GateMetric.ANSWERS)


@dataclass(frozen=True, slots=True, kw_only=True)
class Canary:
    steps: tuple[CanaryStep, ...] = SectionList(
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
    ).default(DEFAULT_STEPS)
    gates: tuple[Gate, ...] = SectionList(
        "The comparisons with the stable revision that the canary must pass. Default is TimeToFirstToken p95 and "
        "InterTokenLatency p95 within 15 %, and an ErrorRate of at most 0.5 %.",
        item="A gate.",
        min_items=1,
        max_items=_MAX_GATES,
        is_default_stored=False,
    ).default(DEFAULT_GATES)
    min_requests: int = Integer(
        "Number of requests of the canary before a gate can pass or a latency can fail; for a latency, those at "
        "equal load per replica count. Restarts and failed starts of its replicas, requests without an answer, and "
        "an error rate far above its limit fail the canary earlier.",
        minimum=50,
        maximum=1_000_000,
    ).default(500)
    max_requests: int | None = Integer(
        "Number of requests of the canary from which, at the end of the last step, onInconclusive decides about "
        "gates without a certain verdict. Default is 40 times minRequests.",
        minimum=50,
        maximum=100_000_000,
    ).default(None)
    on_inconclusive: OnInconclusive = Choice(
        "Estimate passes a gate whose figure is within the limit, though not with certainty, and fails it "
        "otherwise. Fail and Pass decide without the figure."
    ).default(OnInconclusive.ESTIMATE)
    answer_sample_percent: float | None = Percent(
        "Share of the requests with temperature 0 that a gate with metric Answers repeats on both tracks. Default "
        "is 10."
    ).default(None)
    on_failure: OnFailure = Choice(
        "Rollback removes a canary that fails. Pause stops its requests and keeps its replicas for inspection."
    ).default(OnFailure.ROLLBACK)

    RULES: ClassVar = (
        Rule(
            cel="!has(self.answerSamplePercent) "
            "|| (has(self.gates) && self.gates.exists(gate, gate.metric == 'Answers'))",
            holds=lambda canary, document: canary.answer_sample_percent is None or canary.compares_answers,
            message="answerSamplePercent is for a gate with metric Answers: add one, or remove the field",
        ),
        Rule(
            cel="!has(self.maxRequests) || self.maxRequests >= (has(self.minRequests) ? self.minRequests : 500)",
            holds=lambda canary, document: canary.most_requests >= canary.min_requests,
            message="maxRequests must not be below minRequests: raise it, or lower minRequests",
        ),
    )

    @property
    def most_requests(self) -> int:
        """The requests of the canary after which ``on_inconclusive`` decides."""
        return _MOST_REQUESTS * self.min_requests if self.max_requests is None else self.max_requests

    @property
    def compares_answers(self) -> bool:
        return any(gate.metric is GateMetric.ANSWERS for gate in self.gates)

    @property
    def compared_percent(self) -> float:
        """The share of the greedy requests that both tracks answer for a comparison, in percent; 0 without the gate."""
        sample = _ANSWER_SAMPLE_PERCENT if self.answer_sample_percent is None else self.answer_sample_percent
        return sample if self.compares_answers else 0.0

    def check(self, document: Fields) -> None:
        """Note weights that do not rise."""
        for place, (before, step) in enumerate(zip(self.steps, self.steps[1:], strict=False), start=1):
            if step.weight_percent <= before.weight_percent:
                document.problem(
                    f"steps[{place}].weightPercent",
                    f"must be above {before.weight_percent}, the weight of the step before, got {step.weight_percent}; "
                    "order the steps by rising weights",
                )


def equal_load(weight_percent: int, stable_replicas: int) -> tuple[int, int]:
    """Return the canary's number of replicas in a step, and its share of the requests in percent.

    The share is at most that of the step, and as large as gives a replica of the canary the load of a stable one. If
    that of one replica is larger, the replica has less load than a stable one.
    """
    if not stable_replicas:
        return 0, weight_percent
    most, load = ceil(weight_percent * stable_replicas / 100), weight_percent * stable_replicas
    count = max(1, min(most, load // (100 - weight_percent)))
    share = min(weight_percent, round(100 * count / (stable_replicas + count)))
    # A share of few percent may be rounded up by much.
    is_more = share * stable_replicas > (1 + EQUAL_LOAD) * (100 - share) * count
    return (most, weight_percent) if is_more else (count, share)


_NONE = (0, "0%")


class RolloutStrategy(StrEnum):
    ROLLING_UPDATE = "RollingUpdate"
    RECREATE = "Recreate"
    """For clusters without a spare GPU in which replicas need not be replaced one by one."""
    CANARY = "Canary"
    """A changed spec first serves a share of the requests, and replaces replicas only after it was judged."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rollout:
    strategy: RolloutStrategy = Choice(
        "RollingUpdate replaces replicas step by step. Recreate stops all replicas before it starts new ones, for "
        "clusters without a spare GPU. Canary gives a changed spec a share of the requests first, compares it with "
        "the stable revision, and then promotes it by a rolling update or rolls it back."
    ).default(RolloutStrategy.ROLLING_UPDATE)
    max_surge: int | str = CountOrPercent(
        "Maximum number of extra replicas during a rollout, or a percentage, which is rounded up. Default is 1; 0 "
        "needs no spare GPU.",
        is_default_stored=False,
    ).default(1)
    max_unavailable: int | str = CountOrPercent(
        "Maximum number of unavailable replicas during a rollout, or a percentage, which is rounded down. If the "
        "result and maxSurge are 0, one replica may be unavailable. Default is 0.",
        is_default_stored=False,
    ).default(0)
    progress_deadline_seconds: float | None = Duration(
        "Maximum time between two replicas becoming ready during a rollout. After that, the rollout has failed: no "
        "further replica is replaced, and the replicas of the previous revision stay. Default is the start-up "
        "limit of the model (40m, or 1h40m if it is downloaded).",
        minimum=10.0,
    ).default(None)
    windows: None = Removed(
        "Removed: rollouts start at once. To choose the time, set spec.paused to true, and to false when replicas "
        "may be replaced.",
        type="array",
    ).default(None)

    canary: Canary | None = Section(
        "The steps and gates of strategy Canary. Without this section, the defaults apply."
    ).default(None)

    RULES: ClassVar = (
        Rule(
            at="canary",
            cel="self.strategy == 'Canary' || !has(self.canary)",
            holds=lambda rollout, document: rollout.strategy is RolloutStrategy.CANARY or rollout.canary is None,
            message="is used by strategy Canary only: set strategy to Canary, or remove canary",
        ),
        Rule(
            at="maxUnavailable",
            cel="self.strategy == 'Recreate' "
            "|| !((has(self.maxSurge) ? string(self.maxSurge) : '1') in ['0', '0%']) "
            "|| !((has(self.maxUnavailable) ? string(self.maxUnavailable) : '0') in ['0', '0%'])",
            holds=lambda rollout, document: (
                rollout.strategy is RolloutStrategy.RECREATE or rollout.surges or rollout.max_unavailable not in _NONE
            ),
            message="must be at least 1 while maxSurge is 0: otherwise no replica can be replaced",
        ),
        Rule(
            cel="self.strategy != 'Recreate' || (!has(self.maxSurge) && !has(self.maxUnavailable))",
            holds=lambda rollout, document: (
                rollout.strategy is not RolloutStrategy.RECREATE
                or not (document.has("maxSurge") or document.has("maxUnavailable"))
            ),
            message="strategy Recreate does not use maxSurge and maxUnavailable: remove both",
        ),
    )

    @property
    def canary_policy(self) -> Canary | None:
        """The steps and gates; None if a changed spec replaces replicas at once."""
        return (self.canary or Canary()) if self.strategy is RolloutStrategy.CANARY else None

    @property
    def surges(self) -> bool:
        """Return True if replicas are added before others are removed."""
        return self.max_surge not in _NONE


@dataclass(frozen=True, slots=True, kw_only=True)
class Drain:
    timeout_seconds: float = Duration(
        "Maximum time for a stopping replica to finish its streaming responses.",
        maximum=3600.0,
        flags=("drain-timeout",),
    ).default(120.0)
