"""The input and the output of one step: plain columns between the scheduler, the runner and the IPC.

A running sequence owns a *row*, a place in the runner's persistent state (block tables, sampling parameters). It is
assigned at admission and returned at the end, so that a step carries only changes.

Data for the API process is a NamedTuple: it is an array on the wire, at the cost of a tuple.

Legend: B scheduled sequences, T tokens.
"""

from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from quire_engine.core.sampling_params import SamplingParams

FinishReason = Literal["stop", "length", "abort"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Admission:
    """A sequence that gets a row in this step. After a preemption the same sequence is admitted again."""

    row: int
    prompt_token_ids: list[int]
    output_token_ids: list[int]
    """Empty except after a preemption by recompute; penalties distinguish these tokens from the prompt."""
    params: SamplingParams
    seed: int
    eos_token_ids: tuple[int, ...]
    adapter_slot: int = -1
    """The slot of the sequence's adapter; -1 for the base model."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterLoad:
    """An adapter to copy into a slot of the device, in place of the one that is there."""

    slot: int
    adapter: int
    """The number of the adapter."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockUpdates:
    """The blocks appended to block tables of one KV cache group in this step: parallel columns, one entry per block."""

    rows: list[int] = field(default_factory=list)
    positions: list[int] = field(default_factory=list)
    """The place in the row's block table: block ``position`` holds the tokens from position * block_size on."""
    blocks: list[int] = field(default_factory=list)


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockCopies:
    """Whole blocks of one KV cache group to copy between the cache and the swap space: parallel columns."""

    sources: list[int] = field(default_factory=list)
    targets: list[int] = field(default_factory=list)


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptPositions:
    """Prompt tokens of one scheduled sequence whose successors' probabilities are requested."""

    index: int
    """The sequence's place in the batch's columns."""
    first: int
    """The position of the first token; the others follow it, and this step computes all of them."""
    next_token_ids: list[int]
    """The prompt token after each of these."""
    num_logprobs: int
    """The number of most probable tokens to report in addition."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PooledPositions:
    """Consecutive prompt tokens of one scheduled sequence that are pooled; this step computes all of them."""

    index: int
    """The sequence's place in the batch's columns."""
    first: int
    """The position of the first token."""
    count: int
    token_ids: tuple[int, ...] = ()
    """The tokens whose logits are read; without any, the sum of the hidden states is read."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ConstrainedSequences:
    """Sequences that sample under a grammar: parallel columns."""

    places: list[int] = field(default_factory=list)
    """Their places among the sequences that ``Batch.samples`` names."""
    keys: list[int] = field(default_factory=list)


class DraftedLines(NamedTuple):
    """The first line of logits that a sequence samples from, and its drafts, which each have one of the next lines."""

    line: int
    drafts: list[int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """The work of one step. Column i of each [B] list belongs to one scheduled sequence."""

    step: int
    rows: list[int]  # [B]
    num_computed: list[int]  # [B] tokens whose keys and values are in the cache already
    num_scheduled: list[int]  # [B] tokens to compute now, >= 1; sums to T
    token_ids: list[int]  # [T] inputs; 0 where a token is not known yet
    samples: list[bool]  # [B] whether this step reaches the sequence's last token, so that the next one is sampled
    feedback_tokens: list[int]
    """The places in ``token_ids`` of tokens that the previous step samples for the same row (overlapped scheduling)."""
    admitted: list[Admission]
    block_updates: tuple[BlockUpdates, ...]  # one per KV cache group
    released_rows: list[int]
    """The rows returned since the previous step. A row may be released and admitted again in one batch (release first).
    """
    swap_out: tuple[BlockCopies, ...] = ()
    """One entry per KV cache group, or empty: cache to swap space, before anything else in the step."""
    swap_in: tuple[BlockCopies, ...] = ()
    """One entry per KV cache group, or empty: swap space to cache, after ``swap_out`` and before the model runs."""
    prompt_logprobs: list[PromptPositions] = field(default_factory=list)
    constrained: ConstrainedSequences | None = None
    num_drafts: list[int] = field(default_factory=list)
    """[B] how many of the scheduled tokens, the last ones, are drafts to verify; empty if no sequence has any. Only
    sequences that sample have drafts. All their tokens are known, except the drafts of a runner's own draft model."""
    prepares_drafts: bool = True
    """False if drafts do not pay now, so that a runner's draft model should not compute the prompts of the step."""
    adapter_loads: list[AdapterLoad] = field(default_factory=list)
    """The adapters to copy into slots before the model runs, in order; no earlier step reads these slots later."""
    pooled: list[PooledPositions] = field(default_factory=list)

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)


class TokenLogprobs(NamedTuple):
    """The log-probabilities (natural logarithm) at one sampled or prompt token.

    The token's own comes first, then those of the most probable tokens in descending order.
    """

    token_ids: list[int]
    logprobs: list[float]
    rank: int
    """The rank of the token itself; 1 is the most probable."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenMasks:
    """The tokens that are allowed at some of the lines of logits that are sampled from; at others, any token is.

    Each sequence that ``Batch.samples`` names has one line, followed by one for each of its drafts.
    """

    places: list[int]
    """The masked lines."""
    bits: bytes
    """The masks one after another, ``mask_bytes`` each. Token i is bit i % 8 of byte i // 8; 1 means allowed."""


def mask_bytes(vocab_size: int) -> int:
    """Return the length of one mask: whole words of 32 bits."""
    return -(-vocab_size // 32) * 4


@dataclass(frozen=True, slots=True, kw_only=True)
class RunnerOutput:
    """The sampled tokens of a step, in the order of the sequences that ``Batch.samples`` names."""

    token_ids: list[int]
    counts: list[int] | None = None
    """The number of tokens of each of these sequences, at least 1. None if each has one. A step that samples several
    tokens for a sequence must be committed before the next step is scheduled. A sequence with drafts has one token more
    than drafts were accepted, and the accepted ones are computed."""
    logprobs: list[TokenLogprobs | None] | None = None
    """One entry per token. None if no sequence of the batch requested any."""
    prompt_logprobs: list[list[TokenLogprobs]] = field(default_factory=list)
    """For each entry of ``Batch.prompt_logprobs``, one entry per position."""
    pooled: list[bytes] = field(default_factory=list)
    """For each entry of ``Batch.pooled``, the values in float32, in the byte order of the machine."""
    prepare_seconds: float = 0.0
    """The time to build the inputs; with ``run_seconds`` and ``sample_seconds`` it is in the step-time metric."""
    run_seconds: float = 0.0
    sample_seconds: float = 0.0
    swap_seconds: float = 0.0
    """The time of the copies in ``swap_out`` and ``swap_in``; not part of the other three."""
    draft_seconds: float = 0.0
    """The time of a draft model; not part of the others."""
    is_first: bool = False
    """True if it was the first step of its size, which took longer than later ones because it prepared these, too."""


class FinishedSequence(NamedTuple):
    """The end of one sequence."""

    key: int
    reason: FinishReason
    stop_token_id: int | None
    """The token that ended the sequence if the reason is stop; it is among the returned tokens."""


class PromptLogprobs(NamedTuple):
    """The logprobs of the next prompt tokens; the first report starts at the second token."""

    key: int
    entries: list[TokenLogprobs]


class PooledPart(NamedTuple):
    """The values read at the next pooled tokens of a prompt; the sum of all parts is that of the prompt."""

    key: int
    values: bytes
    """float32, in the byte order of the machine."""


class StepOutput(NamedTuple):
    """The output of one step, and its message to the API process: parallel columns, one entry per sampled token."""

    began: float
    """The time at which this step was scheduled."""
    keys: list[int]
    token_ids: list[int]
    logprobs: list[TokenLogprobs | None] | None
    finished: list[FinishedSequence]
    first_scheduled_keys: list[int]
    """The sequences that ran for the first time in this step, so that their queueing ended when it began."""
    first_scheduled_cached: list[int]
    """For each of them, the number of prompt tokens that were found in the prefix cache."""
    prompt_logprobs: list[PromptLogprobs]
    """Each position of a prompt once, before the sequence's first token or with it."""
    pooled: list[PooledPart]
    """Likewise for the pooled positions."""
