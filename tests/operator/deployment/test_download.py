"""The progress of a download: its rate, its time left, when it is worth a status write, and where it is shown."""

from dataclasses import replace

import pytest

from quire_operator.deployment.download import Arrived, Download, appended, download_section, is_news, slowest

GIB = 2**30
HALF = Download(time=1000.0, done_bytes=5 * GIB, total_bytes=10 * GIB, bytes_per_second=GIB // 10)


def readings(*pairs: tuple[float, int], total: int = 1000) -> tuple[Arrived, ...]:
    found: tuple[Arrived, ...] = ()
    for time, done in pairs:
        found = appended(found, Arrived(time, done, total))
    return found


@pytest.mark.parametrize(
    ("seen", "rate", "left"),
    [
        (readings((0, 100)), None, None),
        (readings((0, 100), (10, 300)), 20, 35),
        (readings((0, 0), (50, 500), (100, 500)), 0, None),
        (readings((0, 0), (30, 300), (80, 500)), 4, 125),
        (readings((0, 500), (10, 100)), None, None),
        ((*readings((0, 500)), *readings((10, 600), total=2000))[1:], None, None),
    ],
    ids=["first", "steady", "stalled", "only the last minute", "started again", "another model"],
)
def test_rate_is_that_of_the_last_minute(seen: tuple[Arrived, ...], rate: int | None, left: int | None) -> None:
    found = slowest([seen])
    assert found is not None
    assert (found.bytes_per_second, found.seconds_left) == (rate, left)


def test_changed_total_restarts_the_readings() -> None:
    assert appended(readings((0, 500)), Arrived(10, 600, 2000)) == (Arrived(10, 600, 2000),)


def test_pod_with_most_bytes_left_is_shown() -> None:
    found = slowest([readings((0, 900)), readings((0, 100)), readings((0, 500))])
    assert found is not None and found.done_bytes == 100
    assert slowest([]) is None


@pytest.mark.parametrize(
    ("new", "old", "news"),
    [
        (HALF, None, True),
        (None, HALF, True),
        (None, None, False),
        (HALF, HALF, False),
        (replace(HALF, time=1015.0, done_bytes=5 * GIB + 1), HALF, False),
        (replace(HALF, time=1015.0, done_bytes=6 * GIB), HALF, True),
        (replace(HALF, time=1060.0, done_bytes=5 * GIB + 1), HALF, True),
        (replace(HALF, time=1060.0), HALF, False),
        (replace(HALF, time=1015.0, bytes_per_second=0), HALF, True),
        (HALF, replace(HALF, bytes_per_second=None), True),
        (replace(HALF, total_bytes=11 * GIB), HALF, True),
    ],
)
def test_reports_change_with_percents_or_once_a_minute(new: Download | None, old: Download | None, news: bool) -> None:
    assert is_news(new, old) is news


@pytest.mark.parametrize(
    ("download", "text"),
    [
        (HALF, "5 GiB of 10 GiB (50 %), 102 MiB/s, 51s left"),
        (replace(HALF, bytes_per_second=None), "5 GiB of 10 GiB (50 %)"),
        (replace(HALF, bytes_per_second=2**20), "5 GiB of 10 GiB (50 %), 1 MiB/s, 1h25m left"),
        (replace(HALF, bytes_per_second=0), "5 GiB of 10 GiB (50 %), no bytes arrived in the last minute"),
    ],
)
def test_progress_message_has_bytes_rate_and_time(download: Download, text: str) -> None:
    assert str(download) == f"downloading the model: {text}"


def test_status_has_whole_numbers() -> None:
    assert download_section(HALF) == {
        "time": "1970-01-01T00:16:40Z",
        "downloadedBytes": 5 * GIB,
        "totalBytes": 10 * GIB,
        "bytesPerSecond": GIB // 10,
        "secondsLeft": 51,
    }
