"""Where a decode step's time goes inside the engine process: each op by itself, what is Python around them, and what
the linear layers and the attention kernel would take alone.

Steps with taps and steps without alternate, and the floor is taken between them: the machine's moods meet all three.
"""

import statistics
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from time import perf_counter

import msgspec
import zmq
from steps import Bench
from taps import Call, Taps

from quire_engine.engine import Engine, Step
from quire_engine.ipc.loop import Channel, outputs_message
from quire_engine.ipc.messages import FromEngine

DISPATCH = "Python, dispatch"
SAMPLING = "sampling"
SCHEDULING = "scheduling, commit"
PREPARING = "preparing inputs"
SENDING = "IPC: encode, send"

_WARM_UP_STEPS = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class Anatomy:
    sequences: int
    step_seconds: float
    """Of steps without taps, sending included."""
    parts: dict[str, float]
    """Seconds of a step with taps."""
    linear_floor: float
    attention_floor: float
    """Of the calls of one step, made again and nothing else."""
    receive_seconds: float
    """In the API process, of a step's message."""
    bytes_per_token: float
    """Of those messages."""

    @property
    def floor(self) -> float:
        return self.linear_floor + self.attention_floor

    @property
    def share_of_floor(self) -> float:
        """How much of the floor's speed a step reaches."""
        return self.floor / self.step_seconds


class _Wire:
    """The engine's own channel, to a socket that this process reads as the API process would."""

    def __init__(self, folder: str) -> None:
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.DEALER)
        self._socket.bind(f"ipc://{folder}/engine")
        self._channel = Channel(f"ipc://{folder}/engine")
        self._decoder = msgspec.msgpack.Decoder(FromEngine)
        self.receive_seconds: list[float] = []
        self.bytes = 0

    def send(self, step: Step) -> float:
        """Seconds of it."""
        began = perf_counter()
        self._channel.send(outputs_message(step))
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


def dissect(bench: Bench, *, sequences: int, context: int, rounds: int, steps: int) -> Anatomy:
    """``rounds`` of ``steps`` steps of each kind, over ``sequences`` of at least ``context`` tokens."""
    engine = bench.decoding(sequences, context, _WARM_UP_STEPS + 2 * rounds * steps + 1)
    taps = Taps(bench.model)
    with tempfile.TemporaryDirectory(prefix="quire-") as folder:
        wire = _Wire(folder)
        try:
            for _ in range(_WARM_UP_STEPS):
                _step(engine)
            calls = _record(engine, taps)
            return _dissect(engine, taps, calls, wire, sequences=sequences, rounds=rounds, steps=steps)
        finally:
            wire.close()


def _dissect(
    engine: Engine,
    taps: Taps,
    calls: dict[str, list[Call]],
    wire: _Wire,
    *,
    sequences: int,
    rounds: int,
    steps: int,
) -> Anatomy:
    plain: list[float] = []
    tapped: list[dict[str, float]] = []
    linear: list[float] = []
    attention: list[float] = []
    for _ in range(rounds):
        for _ in range(steps):
            began = perf_counter()
            step = _step(engine)
            plain.append(perf_counter() - began + wire.send(step))
        with taps.attached():
            tapped += [_tapped_step(engine, taps, wire) for _ in range(steps)]
        for _ in range(steps):
            linear.append(_seconds(calls["linear"]))
            attention.append(_seconds(calls["attention"]))
    return Anatomy(
        sequences=sequences,
        step_seconds=statistics.median(plain),
        parts={name: statistics.median(step.get(name, 0.0) for step in tapped) for name in _names(tapped)},
        linear_floor=statistics.median(linear),
        attention_floor=statistics.median(attention),
        receive_seconds=statistics.median(wire.receive_seconds),
        bytes_per_token=wire.bytes / (2 * rounds * steps * sequences),
    )


def _names(steps: Sequence[dict[str, float]]) -> list[str]:
    return list(dict.fromkeys(name for step in steps for name in step))


def _step(engine: Engine) -> Step:
    step = engine.step()
    assert step is not None, "on a CPU a step is done when it returns"
    return step


def _record(engine: Engine, taps: Taps) -> dict[str, list[Call]]:
    with taps.attached(), taps.recording() as calls:
        _step(engine)
    return calls


def _tapped_step(engine: Engine, taps: Taps, wire: _Wire) -> dict[str, float]:
    taps.clear()
    before = asdict(engine.seconds)
    step = _step(engine)
    spent = {part: seconds - before[part] for part, seconds in asdict(engine.seconds).items()}
    ops = taps.seconds
    return {
        **ops,
        SAMPLING: spent["sample"],
        SCHEDULING: spent["schedule"] + spent["output"],
        PREPARING: spent["prepare"] + spent["swap"],
        DISPATCH: max(0.0, spent["run"] - sum(ops.values())),
        SENDING: wire.send(step),
    }


def _seconds(calls: Sequence[Call]) -> float:
    import torch

    with torch.inference_mode():
        began = perf_counter()
        for call in calls:
            call()
        return perf_counter() - began
