"""What one step computes, and what came of it: plain columns between the scheduler, the runner and the IPC.

A sequence that runs owns a *row*: a place in the runner's persistent state (block tables, sampling parameters), given
at admission and taken back at the end, so that a step carries only what changed.
What crosses to the API process is a NamedTuple: the wire has it as an array, at the cost of a tuple.
Legend: B scheduled sequences, T tokens.
"""

from dataclasses import dataclass, field
from typing import NamedTuple

from quire_engine.core.sampling_params import SamplingParams
from quire_engine.core.stopping import FinishReason


@dataclass(frozen=True, slots=True, kw_only=True)
class Admission:
    """A sequence that takes a row in this step. After a preemption the same sequence is admitted anew."""

    row: int
    prompt_token_ids: list[int]
    output_token_ids: list[int]
    """Empty but after a preemption by recompute; penalties need them told apart from the prompt."""
    params: SamplingParams
    seed: int
    eos_token_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockUpdates:
    """Blocks appended to block tables in this step, of one KV cache group: parallel columns, one entry a block."""

    rows: list[int] = field(default_factory=list)
    positions: list[int] = field(default_factory=list)
    """The place in the row's block table: block ``position`` holds tokens position * block_size and on."""
    blocks: list[int] = field(default_factory=list)


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockCopies:
    """Whole blocks of one KV cache group to copy between the cache and the swap space: parallel columns."""

    sources: list[int] = field(default_factory=list)
    targets: list[int] = field(default_factory=list)


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptPositions:
    """Prompt tokens of one scheduled sequence whose successors' probabilities are asked for."""

    index: int
    """The sequence's place in the batch's columns."""
    first: int
    """The position of the first of them; the others follow on it, all among the tokens to compute now."""
    next_token_ids: list[int]
    """The prompt's token after each."""
    num_logprobs: int
    """How many of the likeliest to report beside it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """One step. Column i of each [B] list belongs to one scheduled sequence."""

    step: int
    rows: list[int]  # [B]
    num_computed: list[int]  # [B] tokens whose keys and values are in the cache already
    num_scheduled: list[int]  # [B] tokens to compute now, >= 1; sums to T
    token_ids: list[int]  # [T] inputs; 0 where a token is not known yet
    samples: list[bool]  # [B] whether this step reaches the sequence's last token, so that a next one is drawn
    feedback_tokens: list[int]
    """Places in ``token_ids`` that take the token drawn for the same row by the step before (overlapped scheduling)."""
    admitted: list[Admission]
    block_updates: tuple[BlockUpdates, ...]  # one per KV cache group
    released_rows: list[int]
    """Rows given back since the step before; a row may be released and admitted again in one batch (release first)."""
    swap_out: tuple[BlockCopies, ...] = ()
    """One per KV cache group, or none: cache to swap space, before anything else of the step is done."""
    swap_in: tuple[BlockCopies, ...] = ()
    """One per KV cache group, or none: swap space to cache, after ``swap_out`` and before the model runs."""
    prompt_logprobs: list[PromptPositions] = field(default_factory=list)
    rank_count: int = 1

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)


class TokenLogprobs(NamedTuple):
    """The natural-log probabilities at one sampled token, or at one of a prompt: its own first, then those of the
    likeliest tokens in descending order."""

    token_ids: list[int]
    logprobs: list[float]
    rank: int
    """The rank of the token itself; 1 is the likeliest."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenMasks:
    """The tokens that some of the sampled sequences may take next; the others may take any token."""

    places: list[int]
    """The masked sequences: places among those that ``Batch.samples`` names."""
    bits: bytes
    """The masks one after another, ``mask_bytes`` each. Token i is bit i % 8 of byte i // 8, and 1 allows it."""


def mask_bytes(vocab_size: int) -> int:
    """Return the length of one mask: whole words of 32 bits."""
    return -(-vocab_size // 32) * 4


@dataclass(frozen=True, slots=True, kw_only=True)
class RunnerOutput:
    """The sampled tokens of a step, in the order of the sequences that ``Batch.samples`` names."""

    token_ids: list[int]
    counts: list[int] | None = None
    """The number of tokens of each of these sequences, at least 1. None if each has one. A step that samples several
    for a sequence must be committed before the next one is scheduled."""
    logprobs: list[TokenLogprobs | None] | None = None
    """One entry per token. None when no sequence of the batch asked for any."""
    prompt_logprobs: list[list[TokenLogprobs]] = field(default_factory=list)
    """For each of ``Batch.prompt_logprobs`` one entry a position."""
    prepare_seconds: float = 0.0
    """Building the inputs; with ``run_seconds`` and ``sample_seconds`` it feeds the step-time metric."""
    run_seconds: float = 0.0
    sample_seconds: float = 0.0
    swap_seconds: float = 0.0
    """Copying what ``swap_out`` and ``swap_in`` name; beside the other three."""


class FinishedSequence(NamedTuple):
    """The end of one sequence."""

    key: int
    reason: FinishReason
    stop_token_id: int | None
    """The token that ended it, when the reason is stop; it is among the tokens given out."""
    num_cached_tokens: int
    """Prompt tokens that were found in the prefix cache."""
    num_preemptions: int


class PromptLogprobs(NamedTuple):
    """The logprobs of prompt tokens that follow those reported before; the first report starts at the second token."""

    key: int
    entries: list[TokenLogprobs]


@dataclass(frozen=True, slots=True, kw_only=True)
class StepOutput:
    """What came of one step: parallel columns, one entry a sequence that got a token."""

    keys: list[int]
    token_ids: list[int]
    logprobs: list[TokenLogprobs | None] | None
    finished: list[FinishedSequence]
    first_scheduled_keys: list[int]
    """Sequences that ran for the first time in this step: the end of their queueing."""
    first_scheduled_cached: list[int] = field(default_factory=list)
    """For each of them, the number of prompt tokens that were found in the prefix cache."""
    prompt_logprobs: list[PromptLogprobs] = field(default_factory=list)
    """Each position of a prompt once, before the sequence's first token or with it."""
