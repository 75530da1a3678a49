"""The requests that every server gets: prompts of random token ids of one length, at a fixed concurrency. Pure."""

import random
import re
from collections.abc import Sequence
from dataclasses import dataclass

from benchmarks.serving.comparison.client import Request


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """A workload of ``concurrency`` requests at all times, each of ``input_tokens`` in and ``output_tokens`` out."""

    input_tokens: int
    output_tokens: int
    concurrency: int

    def __str__(self) -> str:
        return f"{self.input_tokens}/{self.output_tokens}@{self.concurrency}"

    @property
    def round_tokens(self) -> int:
        """Return the input and output tokens of one round of concurrent requests."""
        return self.concurrency * (self.input_tokens + self.output_tokens)


STANDARD = (
    Workload(input_tokens=256, output_tokens=64, concurrency=16),
    Workload(input_tokens=1024, output_tokens=128, concurrency=8),
    Workload(input_tokens=32, output_tokens=128, concurrency=32),
)
QUICK = (Workload(input_tokens=64, output_tokens=32, concurrency=8),)
MIN_ROUNDS, MAX_ROUNDS = 2, 100


def parse_workload(text: str) -> Workload:
    """Return the workload of ``256/64@16``. Raise ValueError."""
    found = re.fullmatch(r"(\d+)/(\d+)@(\d+)", text.strip())
    if found is None or "0" in found.groups():
        raise ValueError(f"{text!r} is no workload; write input/output@concurrency, such as 256/64@16")
    sizes = [int(number) for number in found.groups()]
    return Workload(input_tokens=sizes[0], output_tokens=sizes[1], concurrency=sizes[2])


def rounds_for(seconds: float, round_seconds: float) -> int:
    """Return how many rounds of a workload take about ``seconds`` when one takes ``round_seconds``."""
    return max(MIN_ROUNDS, min(MAX_ROUNDS, round(seconds / max(round_seconds, 1e-3))))


def requests_of(workload: Workload, *, rounds: int, vocabulary: int, seed: int) -> Sequence[Request]:
    """Return the requests of a seed.

    No two prompts have a common prefix, so that prefix caches find nothing. Token 0, which ends texts in our models,
    does not occur.
    """
    rng, tokens = random.Random(seed), range(1, vocabulary)
    return [
        Request(prompt=tuple(rng.choices(tokens, k=workload.input_tokens)), max_tokens=workload.output_tokens)
        for _ in range(rounds * workload.concurrency)
    ]
