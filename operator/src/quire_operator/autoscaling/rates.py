"""The speed of one replica and the size of its requests, learned from the engines' own counters.

Part of ``autoscaling.decide``, which converts arrivals to replicas with it. The model of a step's time is

    busy seconds = step · steps + prefill · prompt tokens computed + decode · tokens computed after prompts

and the three costs are the non-negative least-squares fit over decaying sums. Pure: the evidence is a value.
"""

import math
import sys
from dataclasses import dataclass, replace
from itertools import combinations

_HALF_LIFE_BUSY_SECONDS = 300.0
_HALF_LIFE_REQUESTS = 500.0
_ENOUGH_BUSY_SECONDS = 2.0
_ENOUGH_STEPS = 50.0
_ENOUGH_REQUESTS = 5.0
# With one sequence at a time, steps and generated tokens are equal, and their costs cannot be separated. The tie goes
# to the step, which is the cost of a memory-bound step, until fuller batches show more.
_DECODE_RIDGE = 1e-3
# The weight of earlier rates relative to all evidence.
_PRIOR = 0.02
_NEGLIGIBLE = 0.01
_SINGULAR = 1e-9


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """The work of one replica between two samples."""

    steps: float
    prefill_tokens: float
    decode_tokens: float
    """The generated tokens, and the draft tokens that were computed and rejected: a step may compute several tokens of
    a sequence, and a full batch has no drafts, so that generated tokens alone say too little about its speed."""
    busy_seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Rates:
    """The speed of one replica and the mean size of its requests, as in ``status.capacity``."""

    step_seconds: float
    """The cost of a step, whatever it computes."""
    prefill_seconds_per_token: float
    decode_seconds_per_token: float
    """The cost that one more sequence adds to a decode step."""
    mean_prompt_tokens: float
    mean_output_tokens: float
    kv_tokens: float
    """The KV capacity of one replica."""

    @property
    def costs(self) -> tuple[float, float, float]:
        """The costs of a step, a prompt token and a generated token."""
        return self.step_seconds, self.prefill_seconds_per_token, self.decode_seconds_per_token

    @property
    def prefill_tokens_per_second(self) -> float:
        return 0.0 if self.prefill_seconds_per_token == 0 else 1 / self.prefill_seconds_per_token

    def full_batch(self, max_sequences: int) -> float:
        """Return the sequences that a busy replica runs at once: the scheduler's limit, or what the KV cache holds."""
        tokens = self.mean_prompt_tokens + self.mean_output_tokens / 2
        return max(1.0, min(max_sequences, self.kv_tokens / max(tokens, 1.0)))

    def seconds_per_output_token(self, max_sequences: int) -> float:
        """Return a busy replica's time per generated token with a full batch."""
        return self.step_seconds / self.full_batch(max_sequences) + self.decode_seconds_per_token

    def is_near(self, other: "Rates", *, tolerance: float) -> bool:
        """Return True if no relevant value differs by more than ``tolerance``, relative to the larger."""
        pairs = (
            (self.mean_prompt_tokens, other.mean_prompt_tokens),
            (self.mean_output_tokens, other.mean_output_tokens),
            (self.kv_tokens, other.kv_tokens),
        )
        shares = zip(self._shares(), other._shares(), strict=True)
        costs = [
            pair
            for pair, both in zip(zip(self.costs, other.costs, strict=True), shares, strict=True)
            if max(both) >= _NEGLIGIBLE
        ]
        return all(math.isclose(a, b, rel_tol=tolerance) for a, b in (*pairs, *costs))

    def _shares(self) -> tuple[float, float, float]:
        """Return the largest shares of the step, the prompt and the generated tokens in the time of a request."""
        prompt = self.mean_prompt_tokens * self.prefill_seconds_per_token
        generated = self.mean_output_tokens * self.decode_seconds_per_token
        alone = self.mean_output_tokens * self.step_seconds
        among_many = alone / self.full_batch(sys.maxsize)
        whole, least = alone + prompt + generated, among_many + prompt + generated
        return (alone / whole, prompt / least, generated / least) if least > 0 else (0.0, 0.0, 0.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Evidence:
    """Decaying sums from which the rates are solved. Rows have the weight 1 / busy seconds, so errors are relative."""

    # The matrix Σ x·xᵀ/y of x = (steps, prefill, generated), as its upper triangle, and the vector Σ x.
    matrix: tuple[float, float, float, float, float, float] = (0.0,) * 6
    vector: tuple[float, float, float] = (0.0,) * 3
    busy_seconds: float = 0.0
    requests: float = 0.0
    prompt_tokens: float = 0.0
    output_tokens: float = 0.0

    def with_work(self, work: Work) -> "Evidence":
        """Return the evidence with one more row; older rows decay with its busy time."""
        y = work.busy_seconds
        if y <= 0:
            return self
        fade = 0.5 ** (y / _HALF_LIFE_BUSY_SECONDS)
        s, p, g = work.steps, work.prefill_tokens, work.decode_tokens
        row = (s * s / y, s * p / y, s * g / y, p * p / y, p * g / y, g * g / y)
        v = self.vector
        a, b, c, d, e, f = (old * fade + new for old, new in zip(self.matrix, row, strict=True))
        return replace(
            self,
            matrix=(a, b, c, d, e, f),
            vector=(v[0] * fade + s, v[1] * fade + p, v[2] * fade + g),
            busy_seconds=self.busy_seconds * fade + y,
        )

    def with_requests(self, *, requests: float, prompt_tokens: float, output_tokens: float) -> "Evidence":
        """Return the evidence with finished requests and the tokens processed in the same period."""
        fade = 0.5 ** (requests / _HALF_LIFE_REQUESTS)
        return replace(
            self,
            requests=self.requests * fade + requests,
            prompt_tokens=self.prompt_tokens * fade + prompt_tokens,
            output_tokens=self.output_tokens * fade + output_tokens,
        )

    def rates(self, *, kv_tokens: float, before: Rates | None = None) -> Rates | None:
        """Return the fit, or None without enough evidence.

        ``before`` are the rates learned earlier. They decide what the evidence leaves open, such as which of the costs
        a steady stream of similar requests causes.
        """
        enough = (
            self.busy_seconds >= _ENOUGH_BUSY_SECONDS
            and self.vector[0] >= _ENOUGH_STEPS
            and self.requests >= _ENOUGH_REQUESTS
        )
        if not enough:
            return None
        step, prefill, decode = _non_negative_fit(self.matrix, self.vector, None if before is None else before.costs)
        return Rates(
            step_seconds=step,
            prefill_seconds_per_token=prefill,
            decode_seconds_per_token=decode,
            mean_prompt_tokens=self.prompt_tokens / self.requests,
            mean_output_tokens=self.output_tokens / self.requests,
            kv_tokens=kv_tokens,
        )


def _non_negative_fit(
    matrix: tuple[float, float, float, float, float, float],
    vector: tuple[float, float, float],
    before: tuple[float, float, float] | None,
) -> tuple[float, float, float]:
    """Return the non-negative c that minimizes cᵀAc − 2vᵀc.

    This is the unconstrained fit, else the best of the six fits that leave out costs.
    """
    ss, sp, sg, pp, pg, gg = matrix
    if before is None:
        gg *= 1 + _DECODE_RIDGE
    else:
        # Add a little evidence for the earlier value of each cost.
        vector = (
            vector[0] + _PRIOR * ss * before[0],
            vector[1] + _PRIOR * pp * before[1],
            vector[2] + _PRIOR * gg * before[2],
        )
        ss, pp, gg = ss * (1 + _PRIOR), pp * (1 + _PRIOR), gg * (1 + _PRIOR)
    a = ((ss, sp, sg), (sp, pp, pg), (sg, pg, gg))
    whole = _solve([list(row) for row in a], list(vector))
    if whole is not None and min(whole) >= 0:
        return whole[0], whole[1], whole[2]
    best, least = (0.0, 0.0, 0.0), 0.0
    for size in (1, 2):
        for kept in combinations(range(3), size):
            solved = _solve([[a[i][j] for j in kept] for i in kept], [vector[i] for i in kept])
            if solved is None or min(solved) < 0:
                continue
            # At the solution of the normal equations the objective is −vᵀc.
            objective = -sum(vector[i] * c for i, c in zip(kept, solved, strict=True))
            if objective < least:
                costs = dict(zip(kept, solved, strict=True))
                best, least = (costs.get(0, 0.0), costs.get(1, 0.0), costs.get(2, 0.0)), objective
    return best


def _solve(a: list[list[float]], b: list[float]) -> list[float] | None:
    """Return the solution, or None if ``a`` is singular. Pivots on the diagonal are enough for a Gram matrix."""
    n = len(b)
    rows = [[*a[i], b[i]] for i in range(n)]
    for k in range(n):
        pivot = rows[k]
        if pivot[k] <= _SINGULAR * a[k][k]:
            return None
        for i in range(k + 1, n):
            row = rows[i]
            factor = row[k] / pivot[k]
            for j in range(k, n + 1):
                row[j] -= factor * pivot[j]
    solution = [0.0] * n
    for k in range(n - 1, -1, -1):
        value = rows[k][n]
        for j in range(k + 1, n):
            value -= rows[k][j] * solution[j]
        solution[k] = value / rows[k][k]
    return solution
