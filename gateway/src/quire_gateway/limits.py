"""The limits of tenants over all replicas. Each of several gateways enforces its share of every limit.

Under ``proxy``. A tenant is the name of a key. Requests and tokens have token buckets, as in the engine; a gateway's
buckets fill at the limit divided by the number of gateways (ADR 0063). Only the event loop uses this module.
"""

import math
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from quire_common.contract.engine import USAGE_COMMENT
from quire_common.key_file import UNLIMITED, Key, KeyLimits
from quire_common.rate_limits import Bucket, charged, missing, ratelimit_headers, refilled, seconds_to_gain
from quire_gateway.errors import BadRequest, RateLimited

_CONCURRENCY_RETRY_SECONDS = 2
"""The Retry-After at the limit of concurrent sequences: when one of the tenant's own requests ends is unknown."""
_TAIL_BYTES = 4096
_TOTAL_TOKENS = re.compile(rb'"total_tokens": ?(\d{1,12})')
"""Text that the model generated cannot match, because JSON escapes its quotes."""
_MESSAGE_USAGE = re.compile(
    rb'"usage":\{"input_tokens":(\d{1,12}),"cache_creation_input_tokens":(\d{1,12}),'
    rb'"cache_read_input_tokens":(\d{1,12}),"output_tokens":(\d{1,12})\}\}\Z'
)
"""The end of a message in Anthropic's form, whose usage has no total."""


class Limits:
    """The allowances of all tenants at this gateway."""

    def __init__(self, now: Callable[[], float], num_gateways: Callable[[], int]) -> None:
        self._now, self._num_gateways = now, num_gateways
        self._allowances: dict[str, Allowance] = {}

    def of(self, key: Key) -> "Allowance | None":
        """Return the allowance of a key's tenant; None if it never had limits."""
        allowance = self._allowances.get(key.tenant)
        if allowance is None:
            if key.limits == UNLIMITED:
                return None
            allowance = self._allowances[key.tenant] = Allowance(key.tenant, self._now)
        allowance.limits, allowance.num_gateways = key.limits, self._num_gateways()
        return allowance


class Allowance:
    """The requests, tokens and concurrent sequences that one tenant may still use at this gateway."""

    def __init__(self, tenant: str, now: Callable[[], float]) -> None:
        self._tenant, self._now = tenant, now
        self.limits = KeyLimits()
        self.num_gateways = 1
        self._requests: Bucket | None = None
        self._tokens: Bucket | None = None
        self.running = 0
        """The number of sequences that wait or run."""

    def charge_request(self) -> None:
        """Charge one request, whatever becomes of it. Raise ``RateLimited`` at the limit."""
        limit = self.limits.requests_per_minute
        if limit is not None:
            self._requests = self._charge(self._requests, 1.0, limit, "requests")

    @contextmanager
    def admit(self, *, sequences: int, prompt_tokens: float) -> Iterator["Charge"]:
        """Charge the sequences and prompt tokens of a request, whose real number of tokens is charged at its end.

        Raise ``RateLimited`` at a limit, ``BadRequest`` for more sequences than the limit could ever allow here.
        """
        concurrent, limit = self.limits.max_concurrent, self.limits.tokens_per_minute
        if concurrent is not None:
            self._check_concurrency(sequences, concurrent)
        if limit is not None:
            self._tokens = self._charge(self._tokens, prompt_tokens, limit, "tokens")
        self.running += sequences
        charge = Charge(prompt_tokens)
        try:
            yield charge
        finally:
            self.running -= sequences
            limit = self.limits.tokens_per_minute
            if limit is not None:
                self._tokens = charged(self._filled(self._tokens, limit), charge.tokens() - prompt_tokens)

    def headers(self) -> dict[str, str]:
        """Return OpenAI's ``x-ratelimit-*`` headers. What remains is estimated from this gateway's share."""
        headers: dict[str, str] = {}
        for what, limit, bucket in (
            ("requests", self.limits.requests_per_minute, self._requests),
            ("tokens", self.limits.tokens_per_minute, self._tokens),
        ):
            if limit is None:
                continue
            level = self._filled(bucket, limit).level * self.num_gateways
            headers |= ratelimit_headers(what, limit, level)
        return headers

    def _check_concurrency(self, sequences: int, limit: int) -> None:
        # One sequence is always allowed: otherwise some gateways could not serve the tenant at all.
        share = max(1, limit // self.num_gateways)
        if sequences > share:
            raise BadRequest(
                f"{sequences} sequences (prompts times n) exceed the {share} that run at once for this API key at one "
                f"gateway (limit {limit}, gateways {self.num_gateways}); send them in several requests"
            )
        if self.running + sequences > share:
            raise self._limited(f"{limit} concurrent sequences", _CONCURRENCY_RETRY_SECONDS)

    def _charge(self, bucket: Bucket | None, cost: float, limit: int, what: str) -> Bucket:
        share = limit / self.num_gateways
        filled = self._filled(bucket, limit)
        if lack := missing(filled, cost, share):
            raise self._limited(f"{limit} {what} per minute", seconds_to_gain(lack, share))
        return charged(filled, cost)

    def _filled(self, bucket: Bucket | None, limit: int) -> Bucket:
        share, now = limit / self.num_gateways, self._now()
        return refilled(bucket or Bucket(share, now), share, now)

    def _limited(self, limit: str, seconds: float) -> RateLimited:
        wait = max(1, math.ceil(seconds))
        return RateLimited(
            f"the API key {self._tenant} is limited to {limit}; try again in {wait} s", retry_after_seconds=wait
        )


class Charge:
    """The tokens of one request of a limited tenant, read from the answer as it passes."""

    def __init__(self, prompt_tokens: float) -> None:
        self._prompt_tokens = prompt_tokens
        self._events = 0
        self._tail = b""

    def read(self, data: bytes) -> bytes:
        """Read a part of the answer, and return it without the comment that is meant for the gateway."""
        self._tail = (self._tail + data)[-_TAIL_BYTES:]
        self._events += data.count(b"data: ")
        start = data.find(USAGE_COMMENT)
        if start < 0:
            return data
        end = data.find(b"\n\n", start)
        return data[:start] + (data[end + 2 :] if end >= 0 else b"")

    def tokens(self) -> float:
        """Return the total that the replica reported; without a report, the prompt's estimate and one per event."""
        if (usage := _MESSAGE_USAGE.search(self._tail)) is not None:
            return float(sum(map(int, usage.groups())))
        found = _TOTAL_TOKENS.findall(self._tail)
        return float(found[-1]) if found else self._prompt_tokens + self._events
