"""The workload of a benchmark: conversations with arrival times, generated from a seed before the first request.

Pure: the same arguments give the same workload, so two servers, or two versions of one, get the same prompts.
"""

import random
from dataclasses import dataclass

WORDS = """
a about after all also an and any are as at be because been but by call class code could def do each else
every expression false file first for from function get give has have how if import in instance into is it its
key lambda list like local loop make may method module more name new no none not number object of on one only
operator or other out over print python raise return same see self set should so some statement string such
than that the their then there these they this to true try tuple two type under up use used value variable was
what when where which while who why will with would yield you
""".split()  # noqa: SIM905 -- a list of 150 quoted words is no easier to read


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """One request: either token ids (their number is then exact) or text, never both."""

    prompt_token_ids: tuple[int, ...] = ()
    text: str = ""
    max_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Conversation:
    """Turns that follow one another; the first starts ``arrival_seconds`` into the run (open loop)."""

    arrival_seconds: float
    turns: tuple[Turn, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """Lengths of a synthetic workload, in tokens.

    A length is drawn uniformly from ``mean * (1 - jitter)`` to ``mean * (1 + jitter)``. Every prompt starts with one of
    ``prefix_groups`` shared prefixes of ``prefix_tokens`` (these count on top of the input length).
    """

    input_tokens: int
    output_tokens: int
    jitter: float = 0.0
    prefix_tokens: int = 0
    prefix_groups: int = 1
    turns: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Alphabet:
    """Which prompts can be written: token ids from a range, or words (about one token each) for the chat endpoint."""

    first_token_id: int
    last_token_id: int
    words: bool

    def write(self, rng: random.Random, length: int) -> list[int]:
        """Return ``length`` symbols: token ids, or indexes into WORDS."""
        symbols = range(len(WORDS)) if self.words else range(self.first_token_id, self.last_token_id + 1)
        return rng.choices(symbols, k=length)

    def turn(self, symbols: list[int], max_tokens: int) -> Turn:
        if self.words:
            return Turn(text=" ".join(WORDS[symbol] for symbol in symbols), max_tokens=max_tokens)
        return Turn(prompt_token_ids=tuple(symbols), max_tokens=max_tokens)


def arrivals(rng: random.Random, count: int, rate: float | None, burstiness: float) -> list[float]:
    """Arrival times in seconds: all at 0 without a rate, else a renewal process with gamma gaps.

    ``burstiness`` is the gamma shape: 1 is a Poisson process, less is burstier, more is smoother.
    """
    if rate is None:
        return [0.0] * count
    times, now = [], 0.0
    for _ in range(count):
        now += rng.gammavariate(burstiness, 1.0 / (rate * burstiness))
        times.append(now)
    return times


def synthetic(
    shape: Shape, alphabet: Alphabet, *, count: int, rate: float | None, burstiness: float, seed: int
) -> list[Conversation]:
    """``count`` conversations of ``shape``."""
    rng = random.Random(seed)
    prefixes = [alphabet.write(rng, shape.prefix_tokens) for _ in range(shape.prefix_groups)]

    def conversation(arrival: float) -> Conversation:
        prefix = rng.choice(prefixes)
        turns = []
        for number in range(shape.turns):
            own = alphabet.write(rng, _length(rng, shape.input_tokens, shape.jitter))
            symbols = [*prefix, *own] if number == 0 else own
            turns.append(alphabet.turn(symbols, _length(rng, shape.output_tokens, shape.jitter)))
        return Conversation(arrival_seconds=arrival, turns=tuple(turns))

    return [conversation(arrival) for arrival in arrivals(rng, count, rate, burstiness)]


def _length(rng: random.Random, mean: int, jitter: float) -> int:
    return max(1, round(rng.uniform(mean * (1 - jitter), mean * (1 + jitter))))
