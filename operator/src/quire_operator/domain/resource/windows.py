"""Windows of time that recur: a cron expression, a time zone and a duration.

``autoscaling.schedules`` are made of them. Pure: the time is an argument. A change to
daylight-saving time moves the start of a window with the clock on the wall, and leaves its length as it is.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import lru_cache
from itertools import islice, pairwise
from typing import Annotated
from zoneinfo import ZoneInfo, available_timezones

from cronsim import CronSim, CronSimError

from quire_common.quantities import format_duration
from quire_operator.domain.resource.field_kinds import Duration, Text
from quire_operator.domain.resource.fields import Fields, shown
from quire_operator.domain.resource.schema import Rule

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

    cron: Annotated[
        str,
        Text(
            "When windows open: a cron expression with five fields, such as 0 8 * * 1-5 for 8:00 from Monday to "
            "Friday.",
            max_length=100,
            check=_cron_problem,
            rules=(
                Rule(
                    cel="self.matches('^ *[^ ]+( +[^ ]+){4} *$')",
                    message='must be a cron expression of five fields such as "0 8 * * 1-5"',
                ),
            ),
        ),
    ]
    time_zone: Annotated[
        str,
        Text(
            "Time zone of the cron expression, by its name in the IANA database.",
            min_length=1,
            max_length=64,
            check=_time_zone_problem,
        ),
    ] = "UTC"
    duration_seconds: Annotated[
        float,
        Duration(
            "How long a window is open. It may be at most the time between two openings.",
            minimum=60.0,
            maximum=_MAX_SECONDS,
        ),
    ]

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
