"""One histogram in Prometheus' text format: the lines are made once, a scrape fills in the numbers.

Byte for byte what the client library writes, at a tenth of its time; a test compares the two.
"""

from collections.abc import Callable, Mapping

from prometheus_client.utils import floatToGoString

from quire_engine.server.histogram import Histogram

_written: Callable[[float], str] = floatToGoString


class HistogramText:
    def __init__(self, name: str, help: str, labels: Mapping[str, str], histogram: Histogram) -> None:
        self._histogram = histogram
        own = ",".join(f'{label}="{_escaped(value)}"' for label, value in sorted(labels.items()))
        self._head = f"# HELP {name} {help}\n# TYPE {name} histogram\n"
        bounds = [*map(repr, histogram.bounds), "+Inf"]
        self._buckets = [f"{name}_bucket{{{_with_bound(labels, bound)}}} " for bound in bounds]
        self._count = f"{name}_count{{{own}}} "
        self._sum = f"{name}_sum{{{own}}} "

    def text(self) -> str:
        counts = self._histogram.cumulative()
        parts = [self._head]
        for begin, count in zip(self._buckets, counts, strict=True):
            parts += (begin, _written(count), "\n")
        parts += (self._count, _written(counts[-1]), "\n")
        parts += (self._sum, _written(self._histogram.sum), "\n")
        return "".join(parts)


def _with_bound(labels: Mapping[str, str], bound: str) -> str:
    """The library sorts labels by name."""
    return ",".join(f'{label}="{_escaped(value)}"' for label, value in sorted({**labels, "le": bound}.items()))


def _escaped(value: str) -> str:
    return value.replace("\\", r"\\").replace("\n", r"\n").replace('"', r"\"")
