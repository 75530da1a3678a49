"""The progress of a model's download, as ``status.model.download`` and the conditions report it. Pure.

A report changes with whole percents, or once a minute, so that a long download does not flood the API server with
statuses.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from quire_common.quantities import format_bytes, format_duration
from quire_operator.api.fields import clock_time

RENEWED_SECONDS = 60.0
"""A report is renewed at least this often while bytes arrive."""
_RATE_WINDOW_SECONDS = 60.0


@dataclass(frozen=True, slots=True)
class Arrived:
    """The bytes of one pod's download at one time."""

    time: float
    done: int
    total: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Download:
    """The progress of the download that has most left to do."""

    time: float
    done_bytes: int
    total_bytes: int
    bytes_per_second: int | None
    """The rate of the last minute; None after a single reading."""

    @property
    def percent(self) -> int:
        """The whole percents that have arrived."""
        return 100 * self.done_bytes // self.total_bytes if self.total_bytes else 100

    @property
    def seconds_left(self) -> int | None:
        """The time that the rest takes at this rate; None without a rate."""
        left = self.total_bytes - self.done_bytes
        return None if not self.bytes_per_second else -(-left // self.bytes_per_second)

    def __str__(self) -> str:
        text = f"{format_bytes(self.done_bytes)} of {format_bytes(self.total_bytes)} ({self.percent} %)"
        if self.bytes_per_second == 0:
            return f"downloading the model: {text}, no bytes arrived in the last minute"
        if self.bytes_per_second is None or self.seconds_left is None:
            return f"downloading the model: {text}"
        rate, left = format_bytes(self.bytes_per_second), format_duration(_rounded(self.seconds_left))
        return f"downloading the model: {text}, {rate}/s, {left} left"


def appended(readings: Sequence[Arrived], new: Arrived) -> tuple[Arrived, ...]:
    """Return the readings that determine the rate. A download that starts again has none from before."""
    if readings and (new.total, True) != (readings[-1].total, new.done >= readings[-1].done):
        return (new,)
    kept = [reading for reading in readings if new.time - reading.time <= _RATE_WINDOW_SECONDS]
    return (*kept, new)


def slowest(downloads: Sequence[Sequence[Arrived]]) -> Download | None:
    """Return the progress of the pod that has most left to download; None if no pod downloads."""
    return max(map(_progress, downloads), key=lambda one: one.total_bytes - one.done_bytes, default=None)


def is_news(new: Download | None, old: Download | None) -> bool:
    """Return whether the report of a download differs enough to be written."""
    if new is None or old is None:
        return new is not old
    is_other = (new.percent, new.total_bytes) != (old.percent, old.total_bytes)
    has_stopped_or_goes_on = (new.bytes_per_second == 0) is not (old.bytes_per_second == 0)
    is_due = new.time - old.time >= RENEWED_SECONDS and new.done_bytes != old.done_bytes
    return is_other or has_stopped_or_goes_on or is_due or (old.bytes_per_second is None and bool(new.bytes_per_second))


def download_section(download: Download) -> Mapping[str, object]:
    section: dict[str, object] = {
        "time": clock_time(download.time),
        "downloadedBytes": download.done_bytes,
        "totalBytes": download.total_bytes,
    }
    if download.bytes_per_second is not None:
        section["bytesPerSecond"] = download.bytes_per_second
    if download.seconds_left is not None:
        section["secondsLeft"] = download.seconds_left
    return section


def _progress(readings: Sequence[Arrived]) -> Download:
    first, last = readings[0], readings[-1]
    passed = last.time - first.time
    return Download(
        time=last.time,
        done_bytes=last.done,
        total_bytes=last.total,
        bytes_per_second=round((last.done - first.done) / passed) if passed > 0 else None,
    )


def _rounded(seconds: int) -> int:
    """Return a time as people say it: in whole minutes above two."""
    return seconds if seconds <= 120 else 60 * round(seconds / 60)
