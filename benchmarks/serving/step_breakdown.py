#!/usr/bin/env python3
"""Where a decode step's time goes, at several numbers of sequences, and how near it is to what its floor allows.

    python benchmarks/serving/step_breakdown.py [--shape 135M | --model DIR] [--sequences 1 16 64] [--json FILE]
        [--plot FILE.png]

Inside the engine process every op is timed from outside, in this process: medians, steps with and without the taps by
turns. The floor is the linear layers' and the attention kernel's calls of one step made again and nothing else, in the
same process between those steps, with the weights packed as the model packs them. Then a server streams to as many
clients: its own metrics tell the time between steps, /proc the CPU time of its API process. The client runs here, and
on a machine with few CPUs competes with the server for them.
"""

import os
import sys
from argparse import Namespace
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import asdict
from pathlib import Path

import uvloop
from processes import serving
from served_steps import ServedSteps, watch
from shapes import SHAPES, model_folder
from step_anatomy import DISPATCH, PREPARING, SAMPLING, SCHEDULING, SENDING, Anatomy, dissect
from steps import DEMO_MODEL, Bench, usable_threads

from quire_engine.ipc.process import compute_environment

sys.path.insert(0, str(Path(__file__).parents[1] / "kv"))
from report import at_least_one, new_figure, parser, progress, save, save_figure, show

ORDER = ("linear", "attention", "store keys, values", "norms", "activation")
HOST = (SAMPLING, SCHEDULING, PREPARING, DISPATCH, SENDING)
_KV_CACHE = "1GiB"
_KV_CACHE_BYTES = 2**30
_MAX_STREAM_TOKENS = 4096


def parse_arguments() -> Namespace:
    options = parser(__doc__)
    model = options.add_mutually_exclusive_group()
    model.add_argument("--shape", choices=SHAPES, default="135M", help="a Llama of random weights (default 135M)")
    model.add_argument("--model", type=Path, help="a model folder instead, or demo")
    options.add_argument("--load-format", choices=("safetensors", "dummy"), default="safetensors", help="of --model")
    options.add_argument("--dtype", choices=("auto", "float32", "bfloat16"), default="auto")
    options.add_argument("--sequences", type=at_least_one, nargs="+", default=[1, 16, 64], help="(default 1 16 64)")
    options.add_argument("--context", type=at_least_one, default=128, help="tokens as decoding begins (default 128)")
    options.add_argument("--rounds", type=at_least_one, default=4, help="of steps of each kind (default 4)")
    options.add_argument("--steps", type=at_least_one, default=8, help="of each kind in a round (default 8)")
    options.add_argument("--seconds", type=float, default=3.0, help="to watch a server's steps (default 3)")
    options.add_argument("--no-server", action="store_true", help="leave the server out")
    options.add_argument("--threads", type=at_least_one, default=usable_threads())
    return options.parse_args()


def dissect_all(arguments: Namespace, folder: Path, dummy: bool) -> list[Anatomy]:
    bench = Bench(folder, threads=arguments.threads, dtype=arguments.dtype, dummy=dummy, kv_cache_bytes=_KV_CACHE_BYTES)
    with progress() as bar:
        return [
            dissect(
                bench,
                sequences=sequences,
                context=arguments.context,
                rounds=arguments.rounds,
                steps=arguments.steps,
            )
            for sequences in bar.track(arguments.sequences, description="in process")
        ]


def watch_all(arguments: Namespace, folder: Path, dummy: bool) -> list[ServedSteps]:
    flags = ("--dtype", arguments.dtype, "--kv-cache-memory-bytes", _KV_CACHE, "--no-enable-prefix-caching")
    load = ("--load-format", "dummy") if dummy else ()
    with serving(*flags, *load, model=folder, threads=arguments.threads) as server, progress() as bar:
        return [
            uvloop.run(
                watch(
                    server,
                    streams=streams,
                    context=arguments.context,
                    max_tokens=_MAX_STREAM_TOKENS - arguments.context,
                    seconds=arguments.seconds,
                )
            )
            for streams in bar.track(arguments.sequences, description="over HTTP")
        ]


def table(anatomies: Sequence[Anatomy], served: Sequence[ServedSteps]) -> list[list[str]]:
    """A column for each number of sequences."""
    found = {name for anatomy in anatomies for name in anatomy.parts}
    others = sorted(found - {*ORDER, *HOST})
    rows = [
        [name, *(_part(anatomy, name) for anatomy in anatomies)]
        for name in (*(name for name in ORDER if name in found), *others, *HOST)
    ]
    rows.append(["step, without taps", *(_ms(anatomy.step_seconds) for anatomy in anatomies)])
    rows.append(["floor: linear alone", *(_ms(anatomy.linear_floor) for anatomy in anatomies)])
    rows.append(["floor: attention alone", *(_ms(anatomy.attention_floor) for anatomy in anatomies)])
    rows.append(["speed, of the floor's", *(f"{anatomy.share_of_floor:.0%}" for anatomy in anatomies)])
    rows.append(["IPC: bytes per token", *(f"{anatomy.bytes_per_token:.1f}" for anatomy in anatomies)])
    rows.append(["API: receive, decode", *(_ms(anatomy.receive_seconds) for anatomy in anatomies)])
    if served:
        rows.append(["served: from step to step", *(_ms(one.period_seconds) for one in served)])
        rows.append(["served: between steps", *(_ms(one.between_seconds) for one in served)])
        rows.append(["served: API process, CPU a step", *(_ms(one.api_cpu_seconds) for one in served)])
        rows.append(["served: API process, CPU a token", *(f"{one.api_cpu_per_token * 1e6:.0f} us" for one in served)])
        rows.append(["served: tokens/s", *(f"{one.tokens_per_second:,.0f}" for one in served)])
    return rows


def _part(anatomy: Anatomy, name: str) -> str:
    seconds = anatomy.parts.get(name, 0.0)
    return f"{seconds * 1e3:.2f} ms {seconds / sum(anatomy.parts.values()):4.0%}"


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.2f} ms"


def plot(file: Path, title: str, anatomies: Sequence[Anatomy], served: Sequence[ServedSteps]) -> None:
    """Shares of a step in the engine process; beside it what its token costs the API process, on the same scale."""
    figure = new_figure(title, width=9)
    axes = figure.subplots()
    found = {name for anatomy in anatomies for name in anatomy.parts}
    names = [name for name in (*ORDER, *sorted(found - {*ORDER, *HOST}), *HOST) if name in found]
    base = [0.0] * len(anatomies)
    places = range(len(anatomies))
    colours = [f"C{number}" for number in range(10)] + ["0.4", "0.7", "k"]
    for name, colour in zip(names, colours, strict=False):
        shares = [100 * anatomy.parts.get(name, 0.0) / sum(anatomy.parts.values()) for anatomy in anatomies]
        axes.bar([place - 0.17 for place in places], shares, 0.5, bottom=base, label=name, color=colour)
        base = [low + share for low, share in zip(base, shares, strict=True)]
    for place, anatomy in zip(places, anatomies, strict=True):
        level = 100 * anatomy.floor / sum(anatomy.parts.values())
        axes.plot([place - 0.45, place + 0.11], [level, level], "k--", label="" if place else "floor")
    if served:
        pairs = list(zip(anatomies, served, strict=True))
        for attribute, label, colour, shift in (
            ("between_seconds", "served: between steps", "0.75", 0.2),
            ("api_cpu_seconds", "served: API process, CPU", "0.25", 0.34),
        ):
            shares = [100 * getattr(one, attribute) / sum(anatomy.parts.values()) for anatomy, one in pairs]
            axes.bar([place + shift for place in places], shares, 0.12, label=label, color=colour)
    axes.set_xticks(list(places), [f"{one.sequences}: {one.step_seconds * 1e3:.1f} ms" for one in anatomies])
    axes.set(xlabel="sequences that decode: a step's time", ylabel="% of the step")
    handles, labels = axes.get_legend_handles_labels()
    figure.legend(handles[::-1], labels[::-1], loc="outside right upper", fontsize=8)
    save_figure(file, figure)


def main() -> None:
    arguments = parse_arguments()
    os.environ.update(compute_environment(arguments.threads, os.environ))
    given = DEMO_MODEL if arguments.model == Path("demo") else arguments.model
    dummy = given is None or arguments.load_format == "dummy"
    with model_folder(SHAPES[arguments.shape]) if given is None else nullcontext(given) as folder:
        served = [] if arguments.no_server else watch_all(arguments, folder, dummy)
        anatomies = dissect_all(arguments, folder, dummy)
    name = arguments.shape if given is None else given.name
    title = f"A decode step of {name}, {arguments.context} tokens of context, {arguments.threads} threads"
    columns = ("", *(f"{number} sequences" if number > 1 else "1 sequence" for number in arguments.sequences))
    show(title, columns, table(anatomies, served), ("a share is of the parts' sum: taps take time themselves",))
    rows = [asdict(one) | {"share_of_floor": one.share_of_floor} for one in anatomies]
    for row, one in zip(rows, served, strict=False):
        row["served"] = asdict(one) | {
            "between_seconds": one.between_seconds,
            "api_cpu_per_token": one.api_cpu_per_token,
        }
    save(arguments.json, rows)
    if arguments.plot:
        plot(arguments.plot, title, anatomies, served)


if __name__ == "__main__":
    main()
