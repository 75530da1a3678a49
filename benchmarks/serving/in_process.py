"""Clients of an engine in this process, and sequences that only decode.

There is a fixed number of clients; each sends its next request when its last one is answered. They call
``engine.step()`` and know neither tensors nor HTTP.
"""

import random
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from time import perf_counter

from quire_engine.core.sampling_params import SamplingParams
from quire_engine.core.sequence import Request
from quire_engine.engine import Engine

_TOO_SMALL = "the KV cache, or the model's length, is too small for this"


@dataclass(frozen=True, kw_only=True)
class Load:
    concurrency: int
    requests: int
    prompt: int
    output: int


@dataclass(frozen=True, kw_only=True)
class Percentiles:
    """Percentiles in seconds."""

    median: float
    p99: float


@dataclass(frozen=True, kw_only=True)
class Served:
    requests: int
    seconds: float
    prompt_tokens: int
    output_tokens: int
    ttft: Percentiles
    itl: Percentiles

    @property
    def output_tokens_per_second(self) -> float:
        return self.output_tokens / self.seconds

    @property
    def total_tokens_per_second(self) -> float:
        return (self.prompt_tokens + self.output_tokens) / self.seconds


@dataclass(frozen=True, kw_only=True)
class Decoded:
    """Steps in which every sequence gets a token, and none is prefilled."""

    steps: int
    step_seconds: float
    """The whole time divided by the steps, so that a step scheduled ahead counts once."""
    context_tokens: float
    """The tokens that attention reads in a step, over all sequences, as a mean over the steps."""
    schedule_seconds: float
    output_seconds: float
    """The host's time per step for scheduling it and for committing its results."""
    gpu_share: float | None
    """The share of the wall time in which the GPU ran steps; None if it is not measured."""


def percentiles(values: Sequence[float]) -> Percentiles:
    ordered = sorted(values)
    return Percentiles(median=statistics.median(ordered), p99=ordered[min(len(ordered) - 1, int(0.99 * len(ordered)))])


@dataclass
class _Client:
    added: float
    times: list[float] = field(default_factory=list)


class Clients:
    """Clients that send random prompts, greedy and without an end of their own."""

    def __init__(self, engine: Engine, *, vocab_size: int, max_model_len: int) -> None:
        self._engine = engine
        self._max_model_len = max_model_len
        self._chance = random.Random(1)
        self._vocab_size = vocab_size
        self._next_key = 0

    def add(self, prompt: int, output: int) -> int:
        key, self._next_key = self._next_key, self._next_key + 1
        token_ids = [self._chance.randrange(self._vocab_size // 2) for _ in range(prompt)]
        params = SamplingParams(max_tokens=output, temperature=0.0, ignore_eos=True)
        refusal = self._engine.add(Request(key=key, prompt_token_ids=token_ids, params=params, seed=key))
        if refusal is not None:
            raise SystemExit(refusal)
        return key

    def serve(self, load: Load) -> Served:
        """Run ``load.concurrency`` clients until ``load.requests`` are answered."""
        clients: dict[int, _Client] = {}
        began = perf_counter()
        waiting = load.requests
        for _ in range(min(load.concurrency, load.requests)):
            waiting -= 1
            clients[self.add(load.prompt, load.output)] = _Client(added=perf_counter())
        while self._engine.has_work:
            step = self._engine.step()
            now = perf_counter()
            if step is None:
                continue
            for key in step.keys:
                clients[key].times.append(now)
            for _ in step.finished:
                if waiting:
                    waiting -= 1
                    clients[self.add(load.prompt, load.output)] = _Client(added=perf_counter())
        seconds = perf_counter() - began
        between = [
            later - earlier for c in clients.values() for earlier, later in zip(c.times, c.times[1:], strict=False)
        ]
        return Served(
            requests=load.requests,
            seconds=seconds,
            prompt_tokens=load.requests * load.prompt,
            output_tokens=sum(len(client.times) for client in clients.values()),
            ttft=percentiles([client.times[0] - client.added for client in clients.values()]),
            itl=percentiles(between or [0.0]),
        )

    def decode(
        self, sequences: int, context: int, steps: int, *, warm_up: int = 8, gpu_seconds: Callable[[], float] | None
    ) -> Decoded:
        """Measure steps that only decode. ``gpu_seconds`` returns the GPU's working time so far."""
        engine = self._engine
        keys = [self.add(context, self._max_model_len - context) for _ in range(sequences)]
        held = sequences * context
        while (gauges := engine.gauges()).num_running < sequences or gauges.prefilling_tokens:
            if not engine.has_work:
                raise SystemExit(f"{sequences} sequences of {context} tokens never ran together: {_TOO_SMALL}")
            held += self._tokens_of_step()
        held += sum(self._tokens_of_step() for _ in range(warm_up))
        host = (engine.seconds.schedule, engine.seconds.output)
        at_work = gpu_seconds() if gpu_seconds is not None else 0.0
        began = perf_counter()
        drawn = sum(self._tokens_of_step() for _ in range(steps))
        seconds = perf_counter() - began
        share = (gpu_seconds() - at_work) / seconds if gpu_seconds is not None else None
        if drawn != sequences * steps:
            raise SystemExit(f"{drawn} tokens in {steps} steps of {sequences} sequences: {_TOO_SMALL}")
        schedule, output = engine.seconds.schedule - host[0], engine.seconds.output - host[1]
        for key in keys:
            engine.cancel(key)
        while engine.has_work:
            engine.step()
        return Decoded(
            steps=steps,
            step_seconds=seconds / steps,
            context_tokens=held + drawn / 2,
            schedule_seconds=schedule / steps,
            output_seconds=output / steps,
            gpu_share=share,
        )

    def _tokens_of_step(self) -> int:
        step = self._engine.step()
        return 0 if step is None else len(step.token_ids)
