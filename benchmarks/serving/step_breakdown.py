#!/usr/bin/env python3
"""Measure where a decode step's time goes, at several numbers of sequences.

    python -m benchmarks.serving.step_breakdown [--shape 135M | --model DIR] [--sequences 1 16 64] [--json FILE]

Every op is timed by probes in this process. Steps with probes and steps without alternate; figures are medians.
"""

import dataclasses
import os
import statistics
import tempfile
from argparse import Namespace
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from time import perf_counter
from typing import Any, cast

import msgspec
import zmq

from benchmarks.models.random_model import SHAPES, model_folder
from benchmarks.report import (
    DEMO_MODEL,
    at_least_one,
    machine,
    parser,
    progress,
    save,
    show_table,
    usable_cpus,
)
from benchmarks.serving.steps import Bench
from quire_engine.core.batch import StepOutput
from quire_engine.core.ports import LoadedModel
from quire_engine.engine import Engine
from quire_engine.ipc.channel import Channel
from quire_engine.ipc.messages import FromEngine
from quire_engine.ipc.process import compute_environment

OPS = ("linear", "attention", "store keys, values", "norms", "activation")
SAMPLING, SCHEDULING, PREPARING = "sampling", "scheduling, commit", "preparing inputs"
DISPATCH, SENDING = "Python, dispatch", "IPC: encode, send"
HOST = (SAMPLING, SCHEDULING, PREPARING, DISPATCH, SENDING)
_WARM_UP_STEPS = 5
_KV_CACHE_BYTES = 2**30


OP_PARTS = {
    "linear": "linear",
    "paged_attention": "attention",
    "store_kv": "store keys, values",
    "rms_norm": "norms",
    "silu_and_mul": "activation",
    "gelu_tanh_and_mul": "activation",
}
"""The part to which a function belongs; a function that is not listed is a separate part."""


class Probes:
    """The seconds of each part since ``clear``, while ``attached``. An op that calls other ops includes their time."""

    def __init__(self, model: LoadedModel) -> None:
        self._runner = cast(Any, model.runner)
        self._seconds: defaultdict[str, float] = defaultdict(float)
        self._inside = False

    def clear(self) -> None:
        self._seconds.clear()

    @property
    def seconds(self) -> Mapping[str, float]:
        return dict(self._seconds)

    @contextmanager
    def attached(self) -> Iterator[None]:
        from quire_engine.model import layers

        plain_model = self._runner._model
        plain_ops = {
            name: value
            for name, value in vars(layers).items()
            if callable(value) and not isinstance(value, type) and value.__module__.startswith("quire_kernels.")
        }
        try:
            for name, op in plain_ops.items():
                setattr(layers, name, self._timed(OP_PARTS.get(name, name), op))
            self._runner._model = with_linears(plain_model, lambda linear: self._timed("linear", linear))
            yield
        finally:
            self._runner._model = plain_model
            for name, op in plain_ops.items():
                setattr(layers, name, op)

    def _timed(self, part: str, op: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any, **kwargs: Any) -> Any:
            if self._inside:
                return op(*args, **kwargs)
            self._inside = True
            began = perf_counter()
            try:
                return op(*args, **kwargs)
            finally:
                self._seconds[part] += perf_counter() - began
                self._inside = False

        return timed


def with_linears(node: Any, change: Callable[[Callable[..., Any]], Callable[..., Any]]) -> Any:
    """Return the same stack of layers with every linear layer changed."""
    if isinstance(node, tuple):
        return tuple(with_linears(item, change) for item in node)
    if type(node).__module__ == "quire_engine.model.layers":
        parts = {field.name: getattr(node, field.name) for field in dataclasses.fields(node) if field.init}
        return dataclasses.replace(node, **{name: with_linears(part, change) for name, part in parts.items()})
    return change(node) if callable(node) else node


@dataclass(frozen=True, slots=True, kw_only=True)
class Breakdown:
    """The time of a decode step and of its parts."""

    sequences: int
    step_seconds: float
    """Time of a step without probes, including sending its outputs."""
    parts: dict[str, float]
    """Seconds of each part of a step with probes."""
    receive_seconds: float
    """Time that the API process takes to receive and decode a step's message."""
    bytes_per_token: float
    """Size of that message per token."""

    def share(self, part: str) -> float:
        """Return a part's share of the sum of all parts, since the probes take time themselves."""
        return self.parts.get(part, 0.0) / sum(self.parts.values())


class _Wire:
    """The engine's own channel, connected to a socket that this process reads as the API process would."""

    def __init__(self, folder: str) -> None:
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.DEALER)
        self._socket.bind(f"ipc://{folder}/engine")
        self._channel = Channel(f"ipc://{folder}/engine")
        self._decoder = msgspec.msgpack.Decoder(FromEngine)
        self.receive_seconds: list[float] = []
        self.bytes = 0

    def send(self, step: StepOutput) -> float:
        """Send a step's outputs, receive them, and return the seconds of sending."""
        began = perf_counter()
        self._channel.send(step)
        sent = perf_counter() - began
        self._socket.poll()
        began = perf_counter()
        frame = self._socket.recv()
        self._decoder.decode(frame)
        self.receive_seconds.append(perf_counter() - began)
        self.bytes += len(frame)
        return sent

    def close(self) -> None:
        self._channel.close()
        self._socket.close(linger=0)
        self._context.term()


def break_down(bench: Bench, *, sequences: int, context: int, rounds: int, steps: int) -> Breakdown:
    """Run ``rounds`` of ``steps`` steps of each kind over ``sequences`` of at least ``context`` tokens."""
    engine = bench.decoding(sequences, context, _WARM_UP_STEPS + 2 * rounds * steps + 1)
    probes = Probes(bench.model)
    plain: list[float] = []
    probed: list[dict[str, float]] = []
    with tempfile.TemporaryDirectory(prefix="quire-") as folder:
        wire = _Wire(folder)
        try:
            for _ in range(_WARM_UP_STEPS):
                _step(engine)
            for _ in range(rounds):
                for _ in range(steps):
                    began = perf_counter()
                    step = _step(engine)
                    plain.append(perf_counter() - began + wire.send(step))
                with probes.attached():
                    probed += [_probed_step(engine, probes, wire) for _ in range(steps)]
        finally:
            wire.close()
    names = dict.fromkeys(name for step in probed for name in step)
    return Breakdown(
        sequences=sequences,
        step_seconds=statistics.median(plain),
        parts={name: statistics.median(step.get(name, 0.0) for step in probed) for name in names},
        receive_seconds=statistics.median(wire.receive_seconds),
        bytes_per_token=wire.bytes / (2 * rounds * steps * sequences),
    )


def _step(engine: Engine) -> StepOutput:
    step = engine.step()
    assert step is not None, "a step on a CPU is complete when it returns"
    return step


def _probed_step(engine: Engine, probes: Probes, wire: _Wire) -> dict[str, float]:
    probes.clear()
    before = asdict(engine.seconds)
    step = _step(engine)
    spent = {part: seconds - before[part] for part, seconds in asdict(engine.seconds).items()}
    ops = probes.seconds
    return {
        **ops,
        SAMPLING: spent["sample"],
        SCHEDULING: spent["schedule"] + spent["output"],
        PREPARING: spent["prepare"] + spent["swap"],
        DISPATCH: max(0.0, spent["run"] - sum(ops.values())),
        SENDING: wire.send(step),
    }


def part_names(breakdowns: Sequence[Breakdown]) -> list[str]:
    """Return the parts that were found: the known ops, other ops, then the host's work."""
    found = {name for breakdown in breakdowns for name in breakdown.parts}
    return [name for name in (*OPS, *sorted(found - {*OPS, *HOST}), *HOST) if name in found]


def table(breakdowns: Sequence[Breakdown]) -> list[list[str]]:
    """Return the rows of the table, with a column for each number of sequences."""

    def milliseconds(seconds: float) -> str:
        return f"{seconds * 1e3:.2f} ms"

    rows = [
        [name, *(f"{milliseconds(one.parts.get(name, 0.0))} {one.share(name):4.0%}" for one in breakdowns)]
        for name in part_names(breakdowns)
    ]
    rows.append(["step without probes", *(milliseconds(one.step_seconds) for one in breakdowns)])
    rows.append(["IPC: bytes per token", *(f"{one.bytes_per_token:.1f}" for one in breakdowns)])
    rows.append(["API process: receive, decode", *(milliseconds(one.receive_seconds) for one in breakdowns)])
    return rows


def parse_arguments() -> Namespace:
    options = parser(__doc__)
    model = options.add_mutually_exclusive_group()
    model.add_argument("--shape", choices=SHAPES, default="135M", help="a Llama with random weights (default 135M)")
    model.add_argument("--model", type=Path, help="a model folder instead, or demo")
    options.add_argument("--load-format", choices=("safetensors", "dummy"), default="safetensors", help="of --model")
    options.add_argument("--dtype", choices=("auto", "float32", "bfloat16"), default="auto")
    options.add_argument("--sequences", type=at_least_one, nargs="+", default=[1, 16, 64], help="(default 1 16 64)")
    options.add_argument("--context", type=at_least_one, default=128, help="tokens at the first step (default 128)")
    options.add_argument("--rounds", type=at_least_one, default=4, help="rounds of steps of each kind (default 4)")
    options.add_argument("--steps", type=at_least_one, default=8, help="steps of each kind in a round (default 8)")
    options.add_argument("--threads", type=at_least_one, default=len(usable_cpus()))
    return options.parse_args()


def main() -> None:
    arguments = parse_arguments()
    os.environ.update(compute_environment(arguments.threads, os.environ))
    given = DEMO_MODEL if arguments.model == Path("demo") else arguments.model
    dummy = given is None or arguments.load_format == "dummy"
    with model_folder(SHAPES[arguments.shape]) if given is None else nullcontext(given) as folder, progress() as bar:
        bench = Bench(
            folder, threads=arguments.threads, dtype=arguments.dtype, dummy=dummy, kv_cache_bytes=_KV_CACHE_BYTES
        )
        counts = {name: getattr(arguments, name) for name in ("context", "rounds", "steps")}
        breakdowns = [break_down(bench, sequences=count, **counts) for count in bar.track(arguments.sequences)]
    name = arguments.shape if given is None else given.name
    title = f"A decode step of {name}, {arguments.context} tokens of context, {arguments.threads} threads"
    columns = ("", *(f"{number} sequences" if number > 1 else "1 sequence" for number in arguments.sequences))
    notes = ("A share is of the sum of the parts, because the probes take time themselves.", machine())
    show_table(title, columns, table(breakdowns), notes)
    save(arguments.json, [asdict(one) for one in breakdowns])


if __name__ == "__main__":
    main()
