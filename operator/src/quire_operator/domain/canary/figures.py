"""The requests, errors and latencies of both tracks of a model, summed over gateways. Pure."""

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import msgspec

from quire_common.contract.gateway import CANARY, STABLE, bin_start

Histogram = Mapping[int, int]
"""Counts by bin of ``quire_common.contract.gateway``."""


class Track(msgspec.Struct, frozen=True, kw_only=True):
    """The requests that one track has served since the canary's revision began."""

    requests: int = 0
    errors: int = 0
    unanswered: int = 0
    """The requests that waited very long for their first byte, more than once if they still wait."""
    latencies: Mapping[str, Histogram] = {}
    """Histograms by metric, of the requests that met the same load on both tracks."""

    def histogram(self, metric: str) -> Histogram:
        """Return the latencies; empty without any."""
        return self.latencies.get(metric, {})

    def __add__(self, other: "Track") -> "Track":
        """Return the sum."""
        metrics = {*self.latencies, *other.latencies}
        return Track(
            requests=self.requests + other.requests,
            errors=self.errors + other.errors,
            unanswered=self.unanswered + other.unanswered,
            latencies={name: Counter(self.histogram(name)) + Counter(other.histogram(name)) for name in metrics},
        )


class Answers(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    """The sampled requests that both tracks answered for a comparison."""

    compared: int = 0
    """The comparisons that count: the same answer, or a different one."""
    different: int = 0
    near_ties: int = 0
    """Answers that part where the model itself found two tokens nearly equally likely; they do not count."""
    failed: int = 0
    """Comparisons without an answer of both tracks."""

    def __add__(self, other: "Answers") -> "Answers":
        """Return the sum."""
        return Answers(**{name: getattr(self, name) + getattr(other, name) for name in self.__struct_fields__})


@dataclass(frozen=True, slots=True, kw_only=True)
class Tracks:
    """Both tracks of one model."""

    stable: Track = Track()
    canary: Track = Track()
    answers: Answers = Answers()


class _Model(msgspec.Struct, frozen=True):
    revision: str
    tracks: dict[str, Track]
    answers: Answers = Answers()


class _Page(msgspec.Struct, frozen=True):
    models: dict[str, _Model]


TracksPage = Mapping[tuple[str, str], Tracks]
"""The tracks by model and revision of the canary."""


def read_tracks(body: bytes) -> TracksPage:
    """Return what one gateway reports. Raises ``ValueError``."""
    page = msgspec.json.decode(body, type=_Page, strict=False)
    return {
        (model, found.revision): Tracks(
            stable=found.tracks.get(STABLE, Track()),
            canary=found.tracks.get(CANARY, Track()),
            answers=found.answers,
        )
        for model, found in page.models.items()
    }


def summed(pages: Iterable[TracksPage]) -> TracksPage:
    """Return the sum over gateways."""
    total: dict[tuple[str, str], Tracks] = {}
    for page in pages:
        for key, tracks in page.items():
            before = total.get(key, Tracks())
            total[key] = Tracks(
                stable=before.stable + tracks.stable,
                canary=before.canary + tracks.canary,
                answers=before.answers + tracks.answers,
            )
    return total


def count(histogram: Histogram) -> int:
    """Return the number of latencies."""
    return sum(histogram.values())


def quantile(histogram: Histogram, share: float) -> float | None:
    """Return a quantile in seconds; None without latencies."""
    left = share * count(histogram)
    if not left:
        return None
    for number in sorted(histogram):
        if left <= histogram[number]:
            return bin_start(number + left / histogram[number])
        left -= histogram[number]
    return bin_start(max(histogram) + 1)


def above(histogram: Histogram, seconds: float) -> float:
    """Return how many latencies are above a limit; the bin that contains it counts in proportion."""
    total = 0.0
    for number, amount in histogram.items():
        start, end = bin_start(number), bin_start(number + 1)
        if seconds <= start:
            total += amount
        elif seconds < end:
            total += amount * (end - seconds) / (end - start)
    return total
