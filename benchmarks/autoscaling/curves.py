"""What two fleets looked like over the same time, and how far apart they are: the judging half of ``validate.py``."""

from dataclasses import dataclass
from pathlib import Path
from statistics import mean

BIN_SECONDS = 10.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Curves:
    """Two fleets over the same bins: means of what was seen in each."""

    times: list[float]
    waiting: list[float]
    kv_percent: list[float]
    ttft: list[float]
    replicas: list[float]


def curves(points: list[tuple[float, float, float, float]], firsts: list[tuple[float, float]], end: float) -> Curves:
    times = [place * BIN_SECONDS for place in range(int(end / BIN_SECONDS) + 1)]

    def binned(values: list[tuple[float, float]]) -> list[float]:
        return [
            mean(v for at, v in values if t <= at < t + BIN_SECONDS)
            if any(t <= at < t + BIN_SECONDS for at, _ in values)
            else 0.0
            for t in times
        ]

    return Curves(
        times=times,
        waiting=binned([(at, waiting) for at, waiting, _, _ in points]),
        kv_percent=binned([(at, kv) for at, _, kv, _ in points]),
        ttft=binned(firsts),
        replicas=binned([(at, replicas) for at, _, _, replicas in points]),
    )


def error(real: list[float], other: list[float]) -> float:
    return sum(abs(a - b) for a, b in zip(real, other, strict=True)) / (sum(real) or 1.0)


def plot(path: Path, title: str, real: Curves, other: Curves, errors: dict[str, float]) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 10), layout="constrained")
    figure.suptitle(title)
    names = (
        ("waiting", "waiting requests"),
        ("kv_percent", "KV cache in use (%)"),
        ("ttft", "mean time to first token (s)"),
        ("replicas", "ready replicas"),
    )
    for axes, (name, label) in zip(figure.subplots(len(names), 1, sharex=True), names, strict=True):
        middles = [t + BIN_SECONDS / 2 for t in real.times]
        axes.plot(middles, getattr(real, name), label="real", color="tab:blue")
        axes.plot(middles, getattr(other, name), label="simulated", color="tab:orange", linestyle="--")
        axes.set(ylabel=label, ylim=(0, None))
        axes.legend(loc="upper right", title=f"error {errors[name]:.0%}")
    axes.set(xlabel="seconds")
    figure.savefig(path, dpi=110)
