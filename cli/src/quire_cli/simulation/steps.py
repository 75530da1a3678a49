"""The time of steps: a stretch of equal steps, and the prompt tokens of a step while others generate."""

from math import ceil, sqrt

from quire_cli.simulation.scenario import EngineModel

_LEAST_SHARE_OF_PROMPTS = 0.25
"""The share of a bound that prompts get even if decoding alone takes the whole bound, as in the engine."""

_MAX_STEP_SECONDS = 2.0
"""The bound on a step while no sequence decodes, as in the engine."""


class Stretch:
    """``steps`` steps of one batch. Each takes ``growth_seconds`` more than the one before, for contexts grow."""

    __slots__ = ("_first", "_growth", "end", "start", "steps")

    def __init__(self, *, start: float, steps: int, first_seconds: float, growth_seconds: float) -> None:
        self.start = start
        self.steps = steps
        self._first = first_seconds
        self._growth = growth_seconds
        self.end = start + self.seconds(steps)

    def seconds(self, steps: int) -> float:
        """Return the time of the first steps."""
        return steps * self._first + self._growth * (steps * (steps - 1) / 2)

    def done(self, now: float) -> int:
        """Return the number of steps that have ended."""
        begun = self._begun(now)
        return begun if self.start + self.seconds(begun) <= now else begun - 1

    def cut(self, now: float) -> None:
        """End with the step that is under way, or ends just now."""
        self.steps = max(1, self._begun(now))
        self.end = self.start + self.seconds(self.steps)

    def _begun(self, now: float) -> int:
        """Return the smallest number of steps that last until then."""
        elapsed = now - self.start
        if elapsed <= 0.0:
            return 0
        if self._growth:
            half = self._growth / 2
            linear = self._first - half
            count = ceil((sqrt(linear * linear + 4 * half * elapsed) - linear) / (2 * half))
        else:
            count = ceil(elapsed / self._first)
        count = min(count, self.steps)
        # Rounding may have put it one off, either way.
        while count > 1 and self.start + self.seconds(count - 1) >= now:
            count -= 1
        while count < self.steps and self.start + self.seconds(count) < now:
            count += 1
        return count


class StallBound:
    """Prompt tokens of one step at a time; ``begin`` starts the next."""

    def __init__(self, model: EngineModel) -> None:
        self._max_seconds = model.max_generation_stall_seconds
        self._at_least = model.block_size
        self._per_token = 1.0 / model.prefill_tokens_per_second
        self._per_pair = model.prefill_seconds_per_pair
        self._left: float | None = None
        self._tokens = 0

    def begin(self, seconds: float, *, decoding: bool) -> None:
        """Start a step that takes this time without prompts; ``decoding`` says whether sequences would wait for it."""
        self._tokens = 0
        bound = self._max_seconds if decoding else _MAX_STEP_SECONDS
        self._left = None if bound is None else max(bound - seconds, _LEAST_SHARE_OF_PROMPTS * bound)

    def limit(self, count: int, start: int) -> int:
        """Return how many of ``count`` tokens of a prompt, from token ``start`` on, the step may compute."""
        left = self._left
        if left is None or count <= 1 or not (self._per_token or self._per_pair):
            return count
        linear = self._per_token + self._per_pair * start
        fitting = 0
        if left > 0.0:
            fitting = int(2.0 * left / (linear + sqrt(linear * linear + 2.0 * self._per_pair * left)))
        return min(count, max(fitting, self._at_least - self._tokens, 0))

    def add(self, start: int, count: int) -> None:
        """Add the tokens to the step."""
        self._tokens += count
        if self._left is not None:
            self._left -= count * (self._per_token + self._per_pair * (start + count / 2))
