"""Rate limits of tenants as token buckets, which the engine and every gateway enforce."""

import math
from collections.abc import Callable
from dataclasses import dataclass

from quire_common.key_file import UNLIMITED, Key, KeyLimits


@dataclass(frozen=True, slots=True)
class Bucket:
    """The level of a token bucket at a time. Below zero it is in debt: sampled tokens are charged afterwards."""

    level: float
    time: float


def refilled(bucket: Bucket, per_minute: float, now: float) -> Bucket:
    """Return the bucket as it is at ``now``: at most one minute's amount, even after the limit has been lowered."""
    gained = max(0.0, now - bucket.time) * per_minute / 60.0
    return Bucket(min(float(per_minute), bucket.level + gained), now)


def missing(bucket: Bucket, cost: float, per_minute: float) -> float:
    """Return the amount that must flow in before ``cost`` can be charged; 0 where it can be charged now.

    A cost above the bucket's capacity needs a full bucket, and leaves a debt.
    """
    return max(0.0, min(cost, float(per_minute)) - bucket.level)


def charged(bucket: Bucket, cost: float) -> Bucket:
    return Bucket(bucket.level - cost, bucket.time)


def seconds_to_gain(amount: float, per_minute: float) -> float:
    return amount * 60.0 / per_minute


def ratelimit_headers(what: str, limit: int, level: float) -> dict[str, str]:
    """Return OpenAI's ``x-ratelimit-*`` headers of ``requests`` or ``tokens``, with ``level`` left of ``limit``."""
    return {
        f"x-ratelimit-limit-{what}": str(limit),
        f"x-ratelimit-remaining-{what}": str(max(0, math.floor(level))),
        f"x-ratelimit-reset-{what}": written_duration(seconds_to_gain(limit - level, limit)),
    }


def written_duration(seconds: float) -> str:
    """Return a duration as OpenAI writes the time until a reset: 250ms, 7.5s, 1m30s."""
    if seconds < 1.0:
        return f"{math.ceil(seconds * 1000)}ms"
    minutes, rest = divmod(math.ceil(seconds * 10) / 10, 60)
    shown = f"{rest:.1f}".removesuffix(".0") + "s"
    return f"{minutes:.0f}m{shown}" if minutes else shown


_CONCURRENCY_RETRY_SECONDS = 2
"""The Retry-After at the limit of concurrent sequences: when one of the tenant's own requests ends is unknown."""


Limited = Callable[..., Exception]
"""Returns the server's error for a request at a limit: ``(message, *, retry_after_seconds)``; usually its class."""
Oversized = Callable[..., Exception]
"""Returns the server's error for a request with more sequences than its share of the limit ever allows: ``(sequences,
share, *, limit, num_servers)``."""


class Allowances:
    """The allowances of all tenants at this server. ``num_servers`` servers enforce every limit together."""

    def __init__(
        self,
        now: Callable[[], float],
        *,
        limited: Limited,
        oversized: Oversized,
        num_servers: Callable[[], int] = lambda: 1,
    ) -> None:
        self._now, self._num_servers = now, num_servers
        self._limited, self._oversized = limited, oversized
        self._allowances: dict[str, Allowance] = {}

    def of(self, key: Key) -> "Allowance | None":
        """Return the allowance of a key's tenant, with the key's current limits; None if it never had limits."""
        allowance = self._allowances.get(key.tenant)
        if allowance is None:
            if key.limits == UNLIMITED:
                return None
            allowance = Allowance(key.tenant, self._now, limited=self._limited, oversized=self._oversized)
            self._allowances[key.tenant] = allowance
        allowance.limits, allowance.num_servers = key.limits, self._num_servers()
        return allowance


class Allowance:
    """The requests, tokens and concurrent sequences that one tenant may still use at this server."""

    def __init__(self, tenant: str, now: Callable[[], float], *, limited: Limited, oversized: Oversized) -> None:
        self._tenant, self._now = tenant, now
        self._limited, self._oversized = limited, oversized
        self.limits = KeyLimits()
        self.num_servers = 1
        """The servers that enforce the limits together; each allows its share."""
        self._requests: Bucket | None = None
        self._tokens: Bucket | None = None
        self.running = 0
        """The number of sequences that wait or run."""

    def charge_request(self) -> None:
        """Charge one request, whatever becomes of it. Raises the server's error at the limit."""
        limit = self.limits.requests_per_minute
        if limit is not None:
            self._requests = self._charge(self._requests, 1.0, limit, "requests")

    def charge_upload(self) -> None:
        """Count one sequence before the request says how many it has. Raises the server's error at the limit."""
        if self.limits.max_concurrent is not None:
            self._check_concurrency(1, self.limits.max_concurrent)
        self.running += 1

    def charge_sequences(self, sequences: int, prompt_tokens: float) -> None:
        """Charge the sequences of a request, and the tokens of its prompts. Raises the server's error at a limit."""
        concurrent, limit = self.limits.max_concurrent, self.limits.tokens_per_minute
        if concurrent is not None:
            self._check_concurrency(sequences, concurrent)
        if limit is not None:
            self._tokens = self._charge(self._tokens, prompt_tokens, limit, "tokens")
        self.running += sequences

    def refund(self, sequences: int, prompt_tokens: int) -> None:
        """Undo ``charge_sequences`` for a request that was not submitted."""
        self.release(sequences)
        self.charge_tokens(-prompt_tokens)

    def charge_tokens(self, count: float) -> None:
        """Charge sampled tokens, whose number is known only afterwards: they may leave a debt."""
        limit = self.limits.tokens_per_minute
        if limit is not None:
            self._tokens = charged(self._filled(self._tokens, limit), count)

    def release(self, sequences: int) -> None:
        self.running -= sequences
        assert self.running >= 0, "more sequences released than charged"

    def headers(self) -> dict[str, str]:
        """Return OpenAI's ``x-ratelimit-*`` headers. What remains is estimated from this server's share."""
        headers: dict[str, str] = {}
        for what, limit, bucket in (
            ("requests", self.limits.requests_per_minute, self._requests),
            ("tokens", self.limits.tokens_per_minute, self._tokens),
        ):
            if limit is None:
                continue
            level = self._filled(bucket, limit).level * self.num_servers
            headers |= ratelimit_headers(what, limit, level)
        return headers

    def _check_concurrency(self, sequences: int, limit: int) -> None:
        # One sequence is always allowed: otherwise some servers could not serve the tenant at all.
        share = max(1, limit // self.num_servers)
        if sequences > share:
            raise self._oversized(sequences, share, limit=limit, num_servers=self.num_servers)
        if self.running + sequences > share:
            raise self._refused(f"{limit} concurrent sequences", _CONCURRENCY_RETRY_SECONDS)

    def _charge(self, bucket: Bucket | None, cost: float, limit: int, what: str) -> Bucket:
        share = limit / self.num_servers
        filled = self._filled(bucket, limit)
        if lack := missing(filled, cost, share):
            raise self._refused(f"{limit} {what} per minute", seconds_to_gain(lack, share))
        return charged(filled, cost)

    def _filled(self, bucket: Bucket | None, limit: int) -> Bucket:
        share, now = limit / self.num_servers, self._now()
        return refilled(bucket or Bucket(share, now), share, now)

    def _refused(self, limit: str, seconds: float) -> Exception:
        wait = max(1, math.ceil(seconds))
        return self._limited(
            f"the API key {self._tenant} is limited to {limit}; try again in {wait} s", retry_after_seconds=wait
        )
