"""The limits of tenants over all replicas. Each of several gateways enforces its share of every limit.

Under ``proxy``. The allowances are those of the engine; a gateway's buckets fill at the limit divided by the number
of gateways (ADR 0063). Only the event loop uses this module.
"""

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Annotated

import msgspec

from quire_common.contract.engine import USAGE_COMMENT
from quire_common.rate_limits import Allowance, Allowances
from quire_gateway.errors import BadRequest, RateLimited

_TAIL_BYTES = 4096
_FIELD, _DONE = b'"usage":', b"data: [DONE]"
_COMMENT = re.compile(rb"^" + USAGE_COMMENT + rb"(.*)(?:\n\n|\Z)", re.MULTILINE)
"""The comment for the gateway, which is whole. Within a text that the model generated no line begins like this."""
_Tokens = Annotated[int, msgspec.Meta(ge=0, le=10**9)]


def gateway_allowances(now: Callable[[], float], num_gateways: Callable[[], int]) -> Allowances:
    """Return the allowances of all tenants at this gateway, none yet."""
    return Allowances(now, limited=RateLimited, oversized=_oversized, num_servers=num_gateways)


def _oversized(sequences: int, share: int, *, limit: int, num_servers: int) -> BadRequest:
    return BadRequest(
        f"{sequences} sequences (prompts times n) exceed the {share} that run at once for this API key at one "
        f"gateway (limit {limit}, gateways {num_servers}); send them in several requests"
    )


@contextmanager
def admitted(allowance: Allowance, *, sequences: int, prompt_tokens: float) -> Iterator["Charge"]:
    """Charge the sequences and prompt tokens of a request, whose real number of tokens is charged at its end.

    Raise ``RateLimited`` at a limit, ``BadRequest`` for more sequences than the limit could ever allow here.
    """
    allowance.charge_sequences(sequences, prompt_tokens)
    charge = Charge(prompt_tokens)
    try:
        yield charge
    finally:
        allowance.release(sequences)
        allowance.charge_tokens(charge.tokens() - prompt_tokens)


@contextmanager
def uploading(allowance: Allowance | None) -> Iterator[None]:
    """Count a request as one running sequence while its body arrives. Raise ``RateLimited`` at the limit."""
    if allowance is None:
        yield
        return
    allowance.charge_upload()
    try:
        yield
    finally:
        allowance.release(1)


class _Usage(msgspec.Struct):
    """A usage in OpenAI's form, or in Anthropic's, which has no total."""

    total_tokens: _Tokens | None = None
    input_tokens: _Tokens | None = None
    cache_creation_input_tokens: _Tokens = 0
    cache_read_input_tokens: _Tokens = 0
    output_tokens: _Tokens = 0

    @property
    def tokens(self) -> int | None:
        if self.total_tokens is not None or self.input_tokens is None:
            return self.total_tokens
        cached = self.cache_creation_input_tokens + self.cache_read_input_tokens
        return self.input_tokens + cached + self.output_tokens


class _End(msgspec.Struct):
    """The end of an answer, as an object that begins with its usage."""

    usage: _Usage


class Charge:
    """The tokens of one request of a limited tenant, read from the answer as it passes."""

    def __init__(self, prompt_tokens: float) -> None:
        self._prompt_tokens = prompt_tokens
        self._attempts = 0
        """The attempts in which a replica may have worked on the request."""
        self._events = 0
        self._tail = b""
        self._reported: int | None = None

    def start_attempt(self) -> None:
        """Record that the request is sent to a replica."""
        self._attempts += 1

    def record_refusal(self) -> None:
        """Record that this replica refused the request before it worked on it."""
        self._attempts -= 1

    def read(self, data: bytes) -> bytes:
        """Read a part of the answer, and return it without the comment that is meant for the gateway."""
        self._tail = (self._tail + data[-_TAIL_BYTES:])[-_TAIL_BYTES:]
        self._events += data.startswith(b"data: ") + data.count(b"\ndata: ")
        if USAGE_COMMENT not in data:
            return data
        for usage in _COMMENT.findall(data):
            self._report(usage, _Usage)
        return _COMMENT.sub(b"", data)

    def end(self) -> None:
        """Record that the answer is complete: its last object has the usage as one of its last fields.

        What a client sent, such as a JSON schema, may be repeated in an answer and look like a usage. It is deeper in
        the object, so that the rest of the answer after it is not the rest of an object.
        """
        body = self._tail.rstrip().removesuffix(_DONE)
        if self._reported is None and (at := body.rfind(_FIELD)) >= 0:
            self._report(b"{" + body[at:], _End)

    def _report(self, data: bytes, kind: type[_Usage] | type[_End]) -> None:
        with suppress(ValueError, RecursionError):
            found = msgspec.json.decode(data, type=kind)
            self._reported = (found.usage if isinstance(found, _End) else found).tokens

    def tokens(self) -> float:
        """Return the total that the replica reported; without a report, the prompt's estimate and one per event.

        A request that every replica refused costs nothing.
        """
        if self._reported is not None:
            return float(self._reported)
        return self._prompt_tokens + self._events if self._attempts else 0.0
