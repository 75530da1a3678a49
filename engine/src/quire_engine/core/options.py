"""The options of a scheduler, and the traits of the loaded model on which scheduling depends."""

from dataclasses import dataclass
from typing import Literal

PolicyName = Literal["fcfs", "priority", "fair"]
PreemptionMode = Literal["auto", "recompute", "swap"]
SharePrefixes = Literal["tenant", "all"]
MAX_PROMPT_LOGPROBS_POSITIONS = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerOptions:
    """Options of the scheduler, each of which is a flag."""

    max_num_seqs: int = 256
    max_num_batched_tokens: int = 2048
    """At least ``max_num_seqs``, so that every running sequence gets a token in every step."""
    policy: PolicyName = "fcfs"
    """``priority`` runs the request with the lowest number first, and equal numbers in order of arrival; ``fair`` runs
    the tenant that has been served least."""
    preemption_mode: PreemptionMode = "auto"
    """The mode in which a preempted sequence frees its blocks; ``auto`` chooses the one that costs less time."""
    max_generation_stall_seconds: float = 0.25
    """The longest step with prompts while other requests generate; 0 means that there is no bound."""
    enable_prefix_caching: bool = True
    share_prefixes: SharePrefixes = "tenant"
    """``tenant`` lets a request find only the prefixes that its own API key computed; ``all`` those of all keys."""
    check_integrity: bool = False
    """Check blocks, rows and queues after every step, and end the engine process if they are inconsistent. Slow."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelTraits:
    """The traits of a loaded model on which scheduling depends."""

    max_model_len: int
    eos_token_ids: tuple[int, ...] = ()
    pools: bool = False
    """True if every request pools its prompt, and none samples a token."""
    adapter_slots: int = 0
    """The adapters that a step can use besides the base model; with 0, no request may have one."""
    stages: int = 1
    """The stages of the model, one after the other, each of which can run another step at the same time."""
    max_prompt_logprobs_positions: int = MAX_PROMPT_LOGPROBS_POSITIONS
    """The maximum number of prompt positions whose logits a step computes, unless each sequence has only one. With a
    vocabulary of 128,000 tokens they take 128 MB."""
