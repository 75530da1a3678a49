"""Windows of time that recur, over changes of the clock."""

from datetime import datetime

import pytest

from quire_operator.api.fields import Fields, Problem
from quire_operator.api.scaling import RecurringWindow
from quire_operator.api.schema import read_section

BERLIN, NEW_YORK, KOLKATA = "Europe/Berlin", "America/New_York", "Asia/Kolkata"


def at(text: str) -> float:
    moment = datetime.fromisoformat(text)
    assert moment.tzinfo is not None
    return moment.timestamp()


def window(cron: str, zone: str, hours: float) -> RecurringWindow:
    return RecurringWindow(cron=cron, time_zone=zone, duration_seconds=hours * 3600)


OFFICE = window("0 8 * * 1-5", BERLIN, 10)
NIGHT = window("0 22 * * *", BERLIN, 8)
AT_HALF_PAST_TWO = window("30 2 * * *", BERLIN, 1)


@pytest.mark.parametrize(
    ("which", "now", "end"),
    [
        # A Monday in winter: both ends, to the second.
        (OFFICE, "2026-03-02T07:59:59+01:00", None),
        (OFFICE, "2026-03-02T08:00:00+01:00", "2026-03-02T18:00:00+01:00"),
        (OFFICE, "2026-03-02T17:59:59.9+01:00", "2026-03-02T18:00:00+01:00"),
        (OFFICE, "2026-03-02T18:00:00+01:00", None),
        (OFFICE, "2026-03-01T12:00:00+01:00", None),
        # In summer the same wall clock is an hour earlier in UTC.
        (OFFICE, "2026-07-06T06:00:00+00:00", "2026-07-06T16:00:00+00:00"),
        (window("0 8 * * 1-5", "UTC", 10), "2026-07-06T06:00:00+00:00", None),
        (window("30 9 * * *", KOLKATA, 1), "2026-07-06T04:30:00+00:00", "2026-07-06T05:00:00+00:00"),
        # Over midnight, into another day.
        (NIGHT, "2026-03-02T03:00:00+01:00", "2026-03-02T06:00:00+01:00"),
        # The night when clocks go forward lasts its 8 hours, so it ends an hour later by the wall clock.
        (NIGHT, "2026-03-29T06:30:00+02:00", "2026-03-29T07:00:00+02:00"),
        (NIGHT, "2026-03-29T07:00:00+02:00", None),
        # The night when they go back ends an hour earlier by the wall clock.
        (NIGHT, "2026-10-25T04:59:59+01:00", "2026-10-25T05:00:00+01:00"),
        (NIGHT, "2026-10-25T05:00:00+01:00", None),
        # A time that a clock change skips: the window opens right after the gap.
        (AT_HALF_PAST_TWO, "2026-03-29T01:59:59+01:00", None),
        (AT_HALF_PAST_TWO, "2026-03-29T03:00:00+02:00", "2026-03-29T04:00:00+02:00"),
        # A time that comes twice: it opens once, at the first, and is open whatever the wall clock shows.
        (AT_HALF_PAST_TWO, "2026-10-25T02:29:00+02:00", None),
        (AT_HALF_PAST_TWO, "2026-10-25T02:30:00+02:00", "2026-10-25T02:30:00+01:00"),
        (AT_HALF_PAST_TWO, "2026-10-25T02:15:00+01:00", "2026-10-25T02:30:00+01:00"),
        (AT_HALF_PAST_TWO, "2026-10-25T02:31:00+01:00", None),
        # Windows that touch are one; 24 hours from each midnight never end, also where a day has 23 or 25.
        (window("0 0,1,2 * * *", "UTC", 1), "2026-03-02T00:10:00+00:00", "2026-03-02T03:00:00+00:00"),
        (window("0 8 * * *", NEW_YORK, 24), "2026-03-08T09:00:00-04:00", "2026-06-17T08:00:00-04:00"),
    ],
)
def test_window_is_open_until(which: RecurringWindow, now: str, end: str | None) -> None:
    assert which.open_until(at(now)) == (None if end is None else at(end))


@pytest.mark.parametrize(
    ("which", "now", "start"),
    [
        (OFFICE, "2026-03-06T08:00:00+01:00", "2026-03-09T08:00:00+01:00"),
        (OFFICE, "2026-03-27T19:00:00+01:00", "2026-03-30T08:00:00+02:00"),
        (AT_HALF_PAST_TWO, "2026-03-29T01:00:00+01:00", "2026-03-29T03:00:00+02:00"),
        (AT_HALF_PAST_TWO, "2026-10-25T02:30:00+02:00", "2026-10-26T02:30:00+01:00"),
        (AT_HALF_PAST_TWO, "2026-10-25T02:10:00+01:00", "2026-10-26T02:30:00+01:00"),
        (window("0 0 29 2 *", "UTC", 1), "2026-03-02T00:00:00+00:00", "2028-02-29T00:00:00+00:00"),
    ],
)
def test_next_window_starts(which: RecurringWindow, now: str, start: str) -> None:
    assert which.next_start(at(now)) == at(start)


@pytest.mark.parametrize(
    ("body", "path", "reason"),
    [
        ({"duration": "1h"}, "w.cron", "is required"),
        ({"cron": "0 8 * * *"}, "w.duration", "is required"),
        ({"cron": "0 8 * *", "duration": "1h"}, "w.cron", "five fields"),
        ({"cron": "0 0 8 * * *", "duration": "1h"}, "w.cron", "five fields"),
        ({"cron": "@daily", "duration": "1h"}, "w.cron", "five fields"),
        ({"cron": "0 25 * * *", "duration": "1h"}, "w.cron", "invalid hour"),
        ({"cron": "0 8 * * FUNDAY", "duration": "1h"}, "w.cron", "invalid day-of-week"),
        ({"cron": "*/0 8 * * *", "duration": "1h"}, "w.cron", "invalid minute"),
        ({"cron": "0 8 30 2 *", "duration": "1h"}, "w.cron", "invalid day-of-month"),
        ({"cron": 8, "duration": "1h"}, "w.cron", "must be a non-empty string"),
        ({"cron": "0 8 * * *", "duration": "1h", "timeZone": "Mars/Olympus"}, "w.timeZone", "IANA"),
        ({"cron": "0 8 * * *", "duration": "1h", "timeZone": "localtime"}, "w.timeZone", "IANA"),
        ({"cron": "0 8 * * *", "duration": "1h", "timeZone": "../../etc/passwd"}, "w.timeZone", "IANA"),
        ({"cron": "0 8 * * *", "duration": "59s"}, "w.duration", "must be >= 1m"),
        ({"cron": "0 8 * * *", "duration": "200h"}, "w.duration", "must be <= "),
        ({"cron": "0 8 * * *", "duration": "26h"}, "w.duration", "must be <= 24h"),
    ],
)
def test_invalid_window_is_refused(body: dict[str, object], path: str, reason: str) -> None:
    problems: list[Problem] = []
    fields = Fields(body, path="w", problems=problems)
    read_section(RecurringWindow, fields)
    assert [problem.path for problem in problems] == [path]
    assert reason in problems[0].message


def test_valid_window_is_read_with_its_default() -> None:
    problems: list[Problem] = []
    fields = Fields({"cron": "0 8 * * MON-FRI", "duration": "24h"}, path="w", problems=problems)
    expected = RecurringWindow(cron="0 8 * * MON-FRI", time_zone="UTC", duration_seconds=86_400.0)
    assert read_section(RecurringWindow, fields) == expected
    assert problems == []
