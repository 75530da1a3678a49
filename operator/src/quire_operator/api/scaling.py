"""spec.autoscaling: bounds, targets, schedules, and scaling to zero."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from enum import StrEnum
from functools import lru_cache
from itertools import islice, pairwise
from typing import ClassVar
from zoneinfo import ZoneInfo, available_timezones

from cronsim import CronSim, CronSimError

from quire_common.quantities import format_duration
from quire_operator.api.field_kinds import Choice, Duration, Integer, Text
from quire_operator.api.fields import Fields, shown
from quire_operator.api.scaling_limits import (
    Behavior,
    ScaleDown,
    ScaleDownSteps,
    ScaleUp,
    ScaleUpSteps,
    SelectPolicy,
    StepsSection,
)
from quire_operator.api.schema import Rule, Section, SectionList

_MAX_SECONDS = 7 * 86_400.0
_FIELDS = 5
_SAMPLED_STARTS = 100
"""The number of starts that are checked for overlapping windows."""
_CLOCK_CHANGE_SECONDS = 3600.0
"""A window of a whole day is valid, though one day a year lasts an hour less."""
_JOINED = 100
_OF_THE_MACHINE = frozenset({"localtime"})
"""A name that means another zone on each machine."""
_REFERENCE = datetime(2026, 1, 1, tzinfo=UTC)


def _cron_problem(text: str) -> str | None:
    if len(text.split()) != _FIELDS:
        return 'must be a cron expression of five fields such as "0 8 * * 1-5" (minute, hour, day, month, weekday)'
    try:
        CronSim(text, _REFERENCE)
    except CronSimError as error:
        what = str(error).removeprefix("Bad ")
        return f'has an invalid {what}: a cron expression is for example "0 8 * * 1-5", at 8:00 from Monday to Friday'
    return None


def _time_zone_problem(text: str) -> str | None:
    if text in _time_zones():
        return None
    return 'is not a time zone of the IANA database; names are like "UTC", "Europe/Berlin" or "America/New_York"'


@dataclass(frozen=True, slots=True, kw_only=True)
class RecurringWindow:
    """Windows that start whenever ``cron`` says so, and are open for ``duration_seconds`` each."""

    cron: str = Text(
        "When windows open: a cron expression with five fields, such as 0 8 * * 1-5 for 8:00 from Monday to Friday.",
        max_length=100,
        check=_cron_problem,
        rules=(
            Rule(
                cel="self.matches('^ *[^ ]+( +[^ ]+){4} *$')",
                message='must be a cron expression of five fields such as "0 8 * * 1-5"',
            ),
        ),
    ).required()
    time_zone: str = Text(
        "Time zone of the cron expression, by its name in the IANA database.",
        min_length=1,
        max_length=64,
        check=_time_zone_problem,
    ).default("UTC")
    duration_seconds: float = Duration(
        "How long a window is open. It may be at most the time between two openings.",
        minimum=60.0,
        maximum=_MAX_SECONDS,
    ).required()

    def check(self, document: Fields) -> None:
        """Note a window that never opens, or that is still open when it opens again."""
        gap = _shortest_gap(self.cron, self.time_zone)
        if gap is None:
            document.problem("cron", f"matches no date; got {shown(self.cron)}")
        elif self.duration_seconds > gap + _CLOCK_CHANGE_SECONDS:
            document.problem(
                "duration",
                f"must be <= {format_duration(gap)}, the time between two starts of {shown(self.cron)}, "
                f'got "{format_duration(self.duration_seconds)}"; shorten it, or start less often',
            )

    def __str__(self) -> str:
        return f'"{self.cron}" {self.time_zone} for {format_duration(self.duration_seconds)}'

    def open_until(self, now: float) -> float | None:
        """Return when the window that is open now closes; None if none is open. Adjacent windows count as one."""
        end = None
        for start in _starts(self.cron, self.time_zone, after=now - self.duration_seconds):
            if start > now:
                break
            end = start + self.duration_seconds
        if end is None:
            return None
        for start in islice(_starts(self.cron, self.time_zone, after=now), _JOINED):
            if start > end:
                break
            end = start + self.duration_seconds
        return end

    def next_start(self, now: float) -> float | None:
        """Return when the next window starts after ``now``."""
        return next(_starts(self.cron, self.time_zone, after=now), None)


@lru_cache(maxsize=1024)
def _shortest_gap(cron: str, time_zone: str) -> float | None:
    """Return the shortest time between two starts; None if there is no start at all."""
    starts = list(islice(_starts(cron, time_zone, after=_REFERENCE.timestamp()), _SAMPLED_STARTS))
    if not starts:
        return None
    return min((later - earlier for earlier, later in pairwise(starts)), default=_MAX_SECONDS)


def _starts(cron: str, time_zone: str, *, after: float) -> Iterator[float]:
    """Yield the starts after a time, in their order."""
    local = datetime.fromtimestamp(after, ZoneInfo(time_zone))
    for start in CronSim(cron, local):
        # In the hour that a clock change repeats, cronsim goes on from the first of the two.
        if (seconds := start.timestamp()) > after:
            yield seconds


@lru_cache(maxsize=1)
def _time_zones() -> frozenset[str]:
    return frozenset(available_timezones()) - _OF_THE_MACHINE


_PERCENTILE = Integer("Percentage of requests that must meet the threshold.", minimum=1, maximum=99)


@dataclass(frozen=True, slots=True, kw_only=True)
class LatencyTarget:
    """The share of first tokens that wait at most ``threshold_seconds`` beyond their own prefill."""

    percentile: int = _PERCENTILE.default(95)
    threshold_seconds: float = Duration("Maximum waiting time.", minimum=0.001, maximum=3600.0).default(1.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class FirstTokenTarget:
    """The share of first tokens that come within ``threshold_seconds`` after their request."""

    percentile: int = _PERCENTILE.default(95)
    threshold_seconds: float = Duration(
        "Maximum time from the arrival of a request to its first token.", minimum=0.001, maximum=3600.0
    ).required()


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenGapTarget:
    """The share of tokens that follow the one before within ``threshold_seconds``."""

    percentile: int = Integer("Percentage of tokens that must meet the threshold.", minimum=1, maximum=99).default(95)
    threshold_seconds: float = Duration(
        "Maximum time between two tokens of an answer.", minimum=0.001, maximum=60.0
    ).required()


@dataclass(frozen=True, slots=True, kw_only=True)
class ScalingTargets:
    """The maximum load of one replica. Queue and KV bound the demand from below where a person sets them."""

    queue_depth: int | None = Integer(
        "Target number of waiting requests per replica. If unset, only the measured demand is used.", minimum=1
    ).default(None)
    kv_usage_percent: int | None = Integer(
        "Target KV cache usage per replica, in percent. If unset, only the measured demand is used.",
        minimum=1,
        maximum=100,
    ).default(None)
    first_token_wait: LatencyTarget | None = Section(
        "Target for the time that a request waits before its first token, in addition to the computation of its "
        "own prompt. More replicas always shorten it. Default is 1s for 95 %."
    ).default(None)
    total_time_to_first_token: FirstTokenTarget | None = Section(
        "Target for the whole time to the first token, with the computation of the prompt. Replicas are added only "
        "while they help: none of them computes a single prompt faster."
    ).default(None)
    inter_token_latency: TokenGapTarget | None = Section(
        "Target for the time between tokens. It limits how many requests a replica runs at once. Replicas are "
        "added only while they help."
    ).default(None)
    time_to_first_token: LatencyTarget | None = Section(
        "Deprecated name of firstTokenWait. If both are set, firstTokenWait applies."
    ).default(None)

    @property
    def wait(self) -> LatencyTarget:
        """The target for the waiting time of first tokens, under either name."""
        return self.first_token_wait or self.time_to_first_token or LatencyTarget()


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

    after_seconds: float = Duration(
        "Time without requests before the last replica is removed, for models that start slowly. It is at least "
        "scaleDown.window.",
        is_default_stored=False,
    ).default(0.0)
    hold_timeout_seconds: float | None = Duration(
        "Maximum time that the gateway holds a request until a replica is ready. Default follows the measured "
        "start-up time of this model.",
        minimum=1.0,
        maximum=3600.0,
    ).default(None)
    max_held: int | None = Integer(
        "Maximum number of requests for this model that one gateway holds. Default is the gateway's own limit for "
        "all models.",
        minimum=1,
        maximum=100_000,
    ).default(None)


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule(RecurringWindow):
    """Other bounds while a window is open; None is the bound of autoscaling."""

    min_replicas: int | None = Integer(
        "Minimum number of replicas while the window is open. Default is autoscaling.minReplicas."
    ).default(None)
    max_replicas: int | None = Integer(
        "Maximum number of replicas while the window is open. Default is autoscaling.maxReplicas.", minimum=1
    ).default(None)

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
    mode: AutoscalingMode = Choice(
        "Enforce applies scaling decisions. Recommend only records and explains them."
    ).default(AutoscalingMode.ENFORCE)
    min_replicas: int = Integer(
        "Minimum number of replicas. With 0, an idle deployment has no replicas; the gateway queues the first "
        "requests until a replica is ready."
    ).default(1)
    max_replicas: int = Integer("Maximum number of replicas.", minimum=1).required()
    metrics_source: MetricsSource | None = Choice(
        "Source of the engine metrics. Pods scrapes the replicas directly. Default is Prometheus if the operator "
        "has a Prometheus address, otherwise Pods."
    ).default(None)
    targets: ScalingTargets = Section(
        "Maximum load per replica. The target that requires the most replicas determines the result.",
        is_default_stored=False,
    ).default(ScalingTargets())
    scale_to_zero: ScaleToZero = Section(
        "How the last replica is removed, and how requests wait for the first one. Used while minReplicas is 0.",
        is_default_stored=False,
    ).default(ScaleToZero())
    scale_up: ScaleUp = StepsSection(
        "Scale-up limits. Each period allows the larger of maxPercent and maxStep.", section=ScaleUpSteps
    ).default(ScaleUpSteps().limits)
    scale_down: ScaleDown = StepsSection("Scale-down limits.", section=ScaleDownSteps).default(ScaleDownSteps().limits)
    behavior: Behavior = Section(
        "The limits of scaleUp and scaleDown in the form of a HorizontalPodAutoscaler, whose defaults then apply. "
        "Each direction is set either here or in scaleUp and scaleDown.",
        is_default_stored=False,
    ).default(Behavior())
    schedules: tuple[Schedule, ...] = SectionList(
        "Other bounds at recurring times. If several windows are open, the first schedule in the list wins. "
        "Replicas for a higher minimum start early enough to be ready when the window opens.",
        item="Bounds that replace those of autoscaling while a window is open.",
        max_items=_MAX_SCHEDULES,
    ).default(())

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
        return min((self.min_replicas, *(self.bounds_of(schedule)[0] for schedule in self.schedules)))

    @property
    def most_replicas(self) -> int:
        return max((self.max_replicas, *(self.bounds_of(schedule)[1] for schedule in self.schedules)))
