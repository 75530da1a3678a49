"""What each tenant still may: asked by the edge for requests and by ``generation`` for tokens and places.

A tenant is the name of a key; keys of one name share one allowance. Limits may change at any time: what runs goes on.
"""

import math
from collections.abc import Callable

from quire_common.key_file import KeyLimits
from quire_engine.errors import InvalidRequest, Overloaded
from quire_engine.server.auth.rate_limits import (
    Bucket,
    missing,
    refilled,
    seconds_to_gain,
    taken,
    written_duration,
)

_PLACE_RETRY_SECONDS = 2
"""When all places are taken: nobody knows when one of the tenant's own requests ends."""


class Allowance:
    """One tenant's. Used from the event loop only."""

    def __init__(self, tenant: str, limits: KeyLimits, now: Callable[[], float]) -> None:
        self._tenant = tenant
        self._now = now
        self.limits = limits
        self._requests: Bucket | None = None
        self._tokens: Bucket | None = None
        self.places = 0
        """Sequences under way."""

    def take_request(self) -> None:
        """Raises Overloaded."""
        limit = self.limits.requests_per_minute
        if limit is None:
            return
        bucket = self._filled(self._requests, limit)
        if lack := missing(bucket, 1.0, limit):
            raise self._over(f"{limit} requests a minute", seconds_to_gain(lack, limit))
        self._requests = taken(bucket, 1.0)

    def take_work(self, sequences: int, prompt_tokens: int) -> None:
        """Places for so many sequences, and their prompts' tokens. Raises Overloaded, InvalidRequest."""
        places, limit = self.limits.max_concurrent, self.limits.tokens_per_minute
        if places is not None and sequences > places:
            raise InvalidRequest(
                f"{sequences} sequences (prompts times n) are more than this API key may have under way ({places}); "
                "send them in several requests"
            )
        if places is not None and self.places + sequences > places:
            raise self._over(f"{places} sequences at once", _PLACE_RETRY_SECONDS)
        if limit is not None:
            bucket = self._filled(self._tokens, limit)
            if lack := missing(bucket, prompt_tokens, limit):
                raise self._over(f"{limit} tokens a minute", seconds_to_gain(lack, limit))
            self._tokens = taken(bucket, prompt_tokens)
        self.places += sequences

    def give_back(self, sequences: int, prompt_tokens: int) -> None:
        """What was taken for a request that could not be sent."""
        self.leave(sequences)
        self.use_tokens(-prompt_tokens)

    def use_tokens(self, count: int) -> None:
        """Drawn tokens: they may leave a debt."""
        limit = self.limits.tokens_per_minute
        if limit is not None:
            self._tokens = taken(self._filled(self._tokens, limit), count)

    def leave(self, sequences: int) -> None:
        self.places -= sequences
        assert self.places >= 0, "left more often than entered"

    def headers(self) -> dict[str, str]:
        """What is left, in OpenAI's words."""
        told: dict[str, str] = {}
        for what, limit, bucket in (
            ("requests", self.limits.requests_per_minute, self._requests),
            ("tokens", self.limits.tokens_per_minute, self._tokens),
        ):
            if limit is None:
                continue
            level = self._filled(bucket, limit).level
            told |= {
                f"x-ratelimit-limit-{what}": str(limit),
                f"x-ratelimit-remaining-{what}": str(max(0, math.floor(level))),
                f"x-ratelimit-reset-{what}": written_duration(seconds_to_gain(limit - level, limit)),
            }
        return told

    def _filled(self, bucket: Bucket | None, limit: int) -> Bucket:
        now = self._now()
        return refilled(bucket or Bucket(float(limit), now), limit, now)

    def _over(self, limit: str, seconds: float) -> Overloaded:
        wait = max(1, math.ceil(seconds))
        return Overloaded(
            f"the API key of {self._tenant} is limited to {limit}; try again in {wait} s", retry_after_seconds=wait
        )
