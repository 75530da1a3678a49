"""The limits of tenants over all replicas. Each of several gateways enforces its share of every limit.

Under ``proxy``. The allowances are those of the engine; a gateway's buckets fill at the limit divided by the number
of gateways (ADR 0063). Only the event loop uses this module.
"""

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from quire_common.allowance import Allowance, Allowances
from quire_common.contract.engine import USAGE_COMMENT
from quire_gateway.errors import BadRequest, RateLimited

_TAIL_BYTES = 4096
_TOTAL_TOKENS = re.compile(rb'"total_tokens": ?(\d{1,12})')
"""Text that the model generated cannot match, because JSON escapes its quotes."""
_MESSAGE_USAGE = re.compile(
    rb'"usage":\{"input_tokens":(\d{1,12}),"cache_creation_input_tokens":(\d{1,12}),'
    rb'"cache_read_input_tokens":(\d{1,12}),"output_tokens":(\d{1,12})\}\}\Z'
)
"""The end of a message in Anthropic's form, whose usage has no total."""
_USAGE = re.compile(rb"^" + USAGE_COMMENT + rb".*(?:\n\n|\Z)", re.MULTILINE)
"""The comment for the gateway, which is whole. Within a text that the model generated no line begins like this."""


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


class Charge:
    """The tokens of one request of a limited tenant, read from the answer as it passes."""

    def __init__(self, prompt_tokens: float) -> None:
        self._prompt_tokens = prompt_tokens
        self._attempts = 0
        """The attempts in which a replica may have worked on the request."""
        self._events = 0
        self._tail = b""

    def start_attempt(self) -> None:
        """Record that the request is sent to a replica."""
        self._attempts += 1

    def record_refusal(self) -> None:
        """Record that this replica refused the request before it worked on it."""
        self._attempts -= 1

    def read(self, data: bytes) -> bytes:
        """Read a part of the answer, and return it without the comment that is meant for the gateway."""
        self._tail = (self._tail + data)[-_TAIL_BYTES:]
        self._events += data.count(b"data: ")
        return _USAGE.sub(b"", data)

    def tokens(self) -> float:
        """Return the total that the replica reported; without a report, the prompt's estimate and one per event.

        A request that every replica refused costs nothing.
        """
        if (usage := _MESSAGE_USAGE.search(self._tail)) is not None:
            return float(sum(map(int, usage.groups())))
        found = _TOTAL_TOKENS.findall(self._tail)
        if found:
            return float(found[-1])
        return self._prompt_tokens + self._events if self._attempts else 0.0
