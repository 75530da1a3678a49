"""How fast one replica works, learnt from its own counters.

Under ``domain.autoscaler``: turns arrivals into replicas. Pure; the evidence is a value that grows and fades.
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Rates:
    """What one replica of this deployment can do, and what its requests are like."""

    step_seconds: float
    """Fixed cost of a step, whatever it computes."""
    prefill_seconds_per_token: float
    decode_seconds_per_token: float
    """Cost that a sequence adds to a decode step."""
    mean_prompt_tokens: float
    mean_output_tokens: float
    kv_tokens: float
    """KV capacity of a replica."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Evidence:
    """Faded sums from which the rates are solved."""
