#!/usr/bin/env python3
"""How generation slows as work grows: tokens/s against sequences, against context and against the model's size.

    python benchmarks/serving/growth.py [--quick] [--only sequences|context|model] [--json FILE] [--plot FILE.png]

In this process, without HTTP. Each point is the median of decode steps; beside it what this machine allows for the
same bytes and products, measured right after it: weights and keys and values are read once a step, while the products
are made. Prompts are not computed for this, their keys and values are random. --plot FILE.png draws three files:
FILE-sequences.png, FILE-context.png and FILE-model.png.
"""

import gc
import os
import statistics
import sys
from argparse import Namespace
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from machine_limits import Work, measure_limits
from random_model import LlamaShape
from shapes import SHAPES, model_folder
from steps import Bench, time_steps, usable_threads
from taps import fill_kv_cache, without_computing

from quire_engine.ipc.process import compute_environment

sys.path.insert(0, str(Path(__file__).parents[1] / "kv"))
from report import at_least_one, new_figure, parser, progress, save, save_figure, show

AXES = {"sequences": "sequences at once", "context": "tokens of context", "model": "parameters, millions"}
_WARM_UP = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    model: str
    sequences: int
    context: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    series: str
    """On which axis it lies."""
    model: str
    parameters: int
    sequences: int
    context: int
    dtype: str
    step_seconds: float
    tokens_per_second: float
    allowed_tokens_per_second: float
    """What memory and arithmetic of this machine allow."""

    @property
    def place(self) -> float:
        return {"sequences": self.sequences, "context": self.context, "model": self.parameters / 1e6}[self.series]


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    sequences: tuple[int, ...] = (1, 2, 4, 8, 16, 32, 64)
    context: tuple[int, ...] = (128, 256, 512, 1024, 2048, 4096)
    models: tuple[str, ...] = tuple(SHAPES)
    model: str = "135M"
    """Of the first two series."""
    at: int = 8
    """Sequences in the other two series."""
    short: int = 128
    """Context in the first and third series."""

    def points(self) -> dict[str, list[Point]]:
        return {
            "sequences": [Point(model=self.model, sequences=n, context=self.short) for n in self.sequences],
            "context": [Point(model=self.model, sequences=self.at, context=n) for n in self.context],
            "model": [Point(model=name, sequences=self.at, context=self.short) for name in self.models],
        }


QUICK = Plan(sequences=(1, 8, 64), context=(128, 1024), models=("5M", "15M"), model="5M")


def parse_arguments() -> Namespace:
    options = parser(__doc__)
    options.add_argument("--quick", action="store_true", help="few points, small models")
    options.add_argument("--only", choices=AXES, nargs="+", default=list(AXES), help="these series (default all)")
    options.add_argument("--dtype", choices=("auto", "float32", "bfloat16"), default="auto")
    options.add_argument("--steps", type=at_least_one, default=15, help="per point (default 15)")
    options.add_argument("--threads", type=at_least_one, default=usable_threads())
    return options.parse_args()


def measure_all(arguments: Namespace, points: dict[str, list[Point]]) -> Iterator[Row]:
    """Model by model, so that each is loaded once and only one is held."""
    for model in dict.fromkeys(point.model for series in points.values() for point in series):
        own = [(name, point) for name, series in points.items() for point in series if point.model == model]
        shape = SHAPES[model]
        most = max(point.sequences * (point.context + arguments.steps + 64) for _, point in own)
        with model_folder(shape) as folder:
            bench = Bench(
                folder,
                threads=arguments.threads,
                dtype=arguments.dtype,
                dummy=True,
                kv_cache_bytes=max(2**26, most * kv_values_per_token(shape) * 4),
            )
        yield from _measure_model(arguments, bench, own)
        del bench
        gc.collect()


def _measure_model(arguments: Namespace, bench: Bench, own: Sequence[tuple[str, Point]]) -> Iterator[Row]:
    import torch

    dtype = getattr(torch, bench.model.dtype)
    fill_kv_cache(bench.model)
    for series, point in own:
        with without_computing(bench.model):
            engine = bench.decoding(point.sequences, point.context, arguments.steps + _WARM_UP)
        time_steps(engine, _WARM_UP)
        seconds = statistics.median(time.wall_seconds for time in time_steps(engine, arguments.steps))
        limits = measure_limits(dtype, arguments.threads)
        allowed = limits.least_seconds(work_of(SHAPES[point.model], point, dtype.itemsize))
        yield Row(
            series=series,
            model=point.model,
            parameters=SHAPES[point.model].parameters,
            sequences=point.sequences,
            context=point.context,
            dtype=bench.model.dtype,
            step_seconds=seconds,
            tokens_per_second=point.sequences / seconds,
            allowed_tokens_per_second=point.sequences / allowed,
        )


def work_of(shape: LlamaShape, point: Point, itemsize: int) -> Work:
    tokens = point.sequences * point.context
    weights = multiplied_weights(shape)
    attention = 4 * tokens * shape.layers * shape.heads * shape.head_dim
    return Work(
        weight_bytes=weights * itemsize,
        kv_bytes=tokens * kv_values_per_token(shape) * itemsize,
        flops=2.0 * weights * point.sequences + attention,
    )


def kv_values_per_token(shape: LlamaShape) -> int:
    return 2 * shape.layers * shape.kv_heads * shape.head_dim


def multiplied_weights(shape: LlamaShape) -> int:
    """Weights that a token is multiplied by: all but the norms' (the embeddings are the LM head's)."""
    return shape.parameters - (2 * shape.layers + 1) * shape.hidden


def cells(row: Row) -> list[str]:
    return [
        AXES[row.series],
        row.model,
        str(row.sequences),
        f"{row.context:,}",
        f"{row.step_seconds * 1e3:.2f}",
        f"{row.tokens_per_second:,.0f}",
        f"{row.allowed_tokens_per_second:,.0f}",
        f"{row.tokens_per_second / row.allowed_tokens_per_second:.0%}",
    ]


def plot(file: Path, series: str, rows: Sequence[Row], title: str) -> None:
    from matplotlib.ticker import LogLocator, StrMethodFormatter  # slow to import, and only a plot needs it

    figure = new_figure(title, width=7)
    axes = figure.subplots()
    places = [row.place for row in rows]
    axes.plot(places, [row.tokens_per_second for row in rows], "o-", label="measured")
    axes.plot(places, [row.allowed_tokens_per_second for row in rows], "k--", label="memory and arithmetic allow")
    axes.set_xscale("log", base=2)
    values = [value for row in rows for value in (row.tokens_per_second, row.allowed_tokens_per_second)]
    if max(values) > 10 * min(values):
        axes.set_yscale("log")
        axes.yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
        axes.yaxis.set_major_formatter(StrMethodFormatter("{x:,.0f}"))
    else:
        axes.set_ylim(bottom=0.0)
    axes.set_xticks(places, [f"{place:,.0f}" for place in places])
    axes.minorticks_off()
    axes.set(xlabel=AXES[series], ylabel="tokens/s generated")
    axes.grid(alpha=0.3)
    axes.legend()
    save_figure(file, figure)


def title_of(series: str, plan: Plan) -> str:
    return {
        "sequences": f"{plan.model}, {plan.short} tokens of context",
        "context": f"{plan.model}, {plan.at} sequences",
        "model": f"{plan.at} sequences, {plan.short} tokens of context",
    }[series]


def main() -> None:
    arguments = parse_arguments()
    os.environ.update(compute_environment(arguments.threads, os.environ))
    plan = QUICK if arguments.quick else Plan()
    points = {series: points for series, points in plan.points().items() if series in arguments.only}
    rows = []
    with progress() as bar:
        for row in bar.track(measure_all(arguments, points), total=sum(map(len, points.values()))):
            rows.append(row)
    columns = ("against", "model", "sequences", "context", "ms a step", "tokens/s", "allowed", "share")
    rows.sort(key=lambda row: (list(AXES).index(row.series), row.place))
    dtypes = ", ".join(dict.fromkeys(row.dtype for row in rows))
    note = f"{dtypes}, {arguments.threads} threads; allowed: by memory and arithmetic as measured right after each"
    show("Tokens/s as work grows", columns, [cells(row) for row in rows], (note,))
    save(arguments.json, [asdict(row) for row in rows])
    if arguments.plot:
        for series in points:
            file = arguments.plot.with_stem(f"{arguments.plot.stem}-{series}")
            plot(file, series, [row for row in rows if row.series == series], title_of(series, plan))
        arguments.plot.unlink()  # only to see that it can be written


if __name__ == "__main__":
    main()
