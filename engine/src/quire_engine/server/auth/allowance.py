"""The rate limits of a tenant: the edge charges requests to them, ``generation`` charges tokens and sequences.

A tenant is the name of a key; keys with the same name share one allowance. Limits may change at any time; requests
that already run are not affected.
"""

import math
from collections.abc import Callable

from quire_common.key_file import KeyLimits
from quire_common.rate_limits import Bucket, charged, missing, ratelimit_headers, refilled, seconds_to_gain
from quire_engine.errors import InvalidRequest, Overloaded

_CONCURRENCY_RETRY_SECONDS = 2
"""The Retry-After at the limit of concurrent sequences: when one of the tenant's own requests ends is unknown."""


class Allowance:
    """The requests, tokens and concurrent sequences that one tenant may still use. Only for the event loop."""

    def __init__(self, tenant: str, limits: KeyLimits, now: Callable[[], float]) -> None:
        self._tenant = tenant
        self._now = now
        self.limits = limits
        self._requests: Bucket | None = None
        self._tokens: Bucket | None = None
        self.running = 0
        """The number of sequences that wait or run."""

    def charge_request(self) -> None:
        """Charge one request. Raises Overloaded at the limit."""
        limit = self.limits.requests_per_minute
        if limit is None:
            return
        bucket = self._filled(self._requests, limit)
        if lack := missing(bucket, 1.0, limit):
            raise self._overloaded(f"{limit} requests per minute", seconds_to_gain(lack, limit))
        self._requests = charged(bucket, 1.0)

    def charge_sequences(self, sequences: int, prompt_tokens: int) -> None:
        """Charge the sequences of a request, and the tokens of its prompts.

        Raises Overloaded at a limit, InvalidRequest for more sequences than the limit could ever allow.
        """
        concurrent, limit = self.limits.max_concurrent, self.limits.tokens_per_minute
        if concurrent is not None and sequences > concurrent:
            raise InvalidRequest(
                f"{sequences} sequences (prompts times n) exceed the {concurrent} concurrent sequences of this API "
                "key; send them in several requests"
            )
        if concurrent is not None and self.running + sequences > concurrent:
            raise self._overloaded(f"{concurrent} concurrent sequences", _CONCURRENCY_RETRY_SECONDS)
        if limit is not None:
            bucket = self._filled(self._tokens, limit)
            if lack := missing(bucket, prompt_tokens, limit):
                raise self._overloaded(f"{limit} tokens per minute", seconds_to_gain(lack, limit))
            self._tokens = charged(bucket, prompt_tokens)
        self.running += sequences

    def refund(self, sequences: int, prompt_tokens: int) -> None:
        """Undo ``charge_sequences`` for a request that was not submitted."""
        self.release(sequences)
        self.charge_tokens(-prompt_tokens)

    def charge_tokens(self, count: int) -> None:
        """Charge sampled tokens, whose number is known only afterwards: they may leave a debt."""
        limit = self.limits.tokens_per_minute
        if limit is not None:
            self._tokens = charged(self._filled(self._tokens, limit), count)

    def release(self, sequences: int) -> None:
        """Count sequences as ended."""
        self.running -= sequences
        assert self.running >= 0, "more sequences released than charged"

    def headers(self) -> dict[str, str]:
        """Return OpenAI's ``x-ratelimit-*`` response headers."""
        headers: dict[str, str] = {}
        for what, limit, bucket in (
            ("requests", self.limits.requests_per_minute, self._requests),
            ("tokens", self.limits.tokens_per_minute, self._tokens),
        ):
            if limit is None:
                continue
            level = self._filled(bucket, limit).level
            headers |= ratelimit_headers(what, limit, level)
        return headers

    def _filled(self, bucket: Bucket | None, limit: int) -> Bucket:
        now = self._now()
        return refilled(bucket or Bucket(float(limit), now), limit, now)

    def _overloaded(self, limit: str, seconds: float) -> Overloaded:
        wait = max(1, math.ceil(seconds))
        return Overloaded(
            f"the API key {self._tenant} is limited to {limit}; try again in {wait} s", retry_after_seconds=wait
        )
