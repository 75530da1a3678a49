"""Who asks: what the edge learnt of a request before any route saw it."""

from dataclasses import dataclass

from quire_engine.server.allowance import Allowance
from quire_engine.server.tracing import Span


@dataclass(frozen=True, slots=True, kw_only=True)
class Caller:
    tenant: str | None = None
    """The name of the key; None where no key is needed."""
    allowance: Allowance | None = None
    """None where the key has no limits."""
    span: Span | None = None
    """None where nothing is traced."""


ANYBODY = Caller()
