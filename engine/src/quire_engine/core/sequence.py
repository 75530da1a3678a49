"""A request, and the sequence of tokens that grows from it.

Only the scheduler changes a sequence. Its plain attributes are read once per step for every running sequence, so they
are stored ready to use (``num_tokens``, ``capacity``, ``limit``) instead of being computed on access.
"""

from dataclasses import InitVar, dataclass, field, replace

from quire_engine.core.batch import Admission, FinishReason
from quire_engine.core.sampling_params import SamplingParams

Order = tuple[int, int]
"""The order of sequences: smaller is served earlier and preempted later. Unique among sequences."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """A client's request, in token ids. ``key`` is the caller's name for it, unique while the request lives."""

    key: int
    prompt_token_ids: list[int]
    params: SamplingParams
    seed: int
    priority: int = 0
    tenant: str | None = None
    gateway_tenant: str | None = None
    """The tenant of a gateway among those who share an API key of this engine: it finds its own prefixes only."""
    cache_salt: str | None = None
    adapter: int | None = None
    """The number of the adapter; None for the base model. Each load of an adapter has a number of its own."""
    parent: int | None = None
    """The key of the first sequence of the same client request (n > 1), which computes their common prompt."""
    output_token_ids: list[int] = field(default_factory=list)
    """The tokens that another engine has sampled; this one continues after them."""


@dataclass(slots=True, eq=False, repr=False)
class Sequence:
    """The tokens of a request and the blocks that hold their keys and values."""

    request: Request
    order: Order
    limit: int
    """The tokens at which the sequence ends in any case; the last one is sampled but never computed."""
    eos_token_ids: tuple[int, ...]
    num_groups: InitVar[int]
    key: int = field(init=False)
    constrained: bool = field(init=False)
    """True if a grammar says which tokens it may sample, and when it ends."""
    masked: bool = field(init=False)
    """True if masks may forbid tokens, for a grammar or for a budget of reasoning."""
    stop_ids: frozenset[int] = field(init=False)
    token_ids: list[int] = field(init=False)
    """The known tokens of prompt and output."""
    num_prompt: int = field(init=False)
    num_prefill: int = field(init=False)
    """The tokens to compute before it decodes: its prompt, and what preemptions discarded."""
    num_tokens: int = field(init=False)
    """The known tokens and the pending samples (``num_pending``, scheduled but not committed)."""
    num_pending: int = 0
    num_computed: int = 0
    """The tokens whose keys and values are in the cache, or will be after the steps in flight."""
    num_cached: int = 0
    num_preemptions: int = 0
    num_lost: int = 0
    """The tokens that had been computed when it was last preempted by recompute."""
    num_to_report: int = 0
    """The prompt tokens whose successors' logprobs are requested, or that are pooled."""
    num_reported: int = 0
    """The part of them that has been reported or need not be, or will be by the steps in flight: a cached prefix ends
    before the others."""
    finished: bool = False
    row: int | None = None
    """Its place in the runner while it runs, else None."""
    adapter_slot: int = -1
    """The slot of its adapter while it runs; -1 for the base model."""
    capacity: int = 0
    """The tokens that the block tables cover, including those that left a window."""
    block_tables: list[list[int]] = field(init=False)
    """The blocks held, per KV cache group."""
    first_blocks: list[int] = field(init=False)
    """The place of the first of these blocks: 0 unless a sliding window has moved on."""
    digests: list[bytes] = field(default_factory=list)
    num_published: int = 0
    swap_tables: list[list[int]] | None = None
    """The host blocks of a preempted sequence that was swapped out, per group: they hold ``num_computed`` tokens from
    ``first_blocks`` on. Other waiting sequences have computed none."""
    family: int | None = None
    """A number that it shares with those that share its prompt, where they are to find it: None where it has no such
    siblings, or prefixes are found by all."""
    parent: "Sequence | None" = None
    """The sequence with which it is parked until its prompt is there (``forks``)."""

    def __post_init__(self, num_groups: int) -> None:
        params = self.request.params
        self.key = self.request.key
        self.constrained = params.grammar is not None
        self.masked = self.constrained or params.reasoning_phase is not None
        ignores_eos = params.ignore_eos and not self.constrained
        self.stop_ids = frozenset((*params.stop_token_ids, *(() if ignores_eos else self.eos_token_ids)))
        self.token_ids = [*self.request.prompt_token_ids, *self.request.output_token_ids]
        self.num_prompt = len(self.request.prompt_token_ids)
        self.num_prefill = self.num_tokens = len(self.token_ids)
        if params.pooling is not None:
            self.num_to_report = self.num_prompt
            self.num_reported = 0 if params.pooling.mean else self.num_prompt - 1
        elif params.prompt_logprobs is not None:
            self.num_to_report = self.num_prompt - 1
        self.block_tables = [[] for _ in range(num_groups)]
        self.first_blocks = [0] * num_groups

    @property
    def num_output(self) -> int:
        return len(self.token_ids) - self.num_prompt

    @property
    def min_tokens(self) -> int:
        """Return the least number of output tokens; the masks of a constrained sequence take care of it."""
        return 0 if self.constrained else self.request.params.min_tokens

    @property
    def decodes(self) -> bool:
        """True if its whole prompt is computed and it may sample another token."""
        return self.num_computed >= self.num_prefill and self.num_tokens < self.limit

    @property
    def num_to_prefill(self) -> int:
        """The tokens to compute before it samples one; 0 for a sequence that decodes."""
        return self.num_tokens - self.num_computed if self.num_computed < self.num_prefill else 0

    def finish_reason(self) -> FinishReason | None:
        """Return why the sequence ends with its last token, or None.

        A stop token before ``min_tokens`` outputs is a token like any other. A stop token that is also the last one
        allowed is a stop, because the model was finished. Stop strings are not known here.
        """
        if self.token_ids[-1] in self.stop_ids and self.num_output > self.min_tokens:
            return "stop"
        return "length" if len(self.token_ids) >= self.limit else None

    def admission(self) -> Admission:
        """Return what the runner needs to assign a row to this sequence."""
        assert self.row is not None and self.num_pending == 0
        params = self.request.params
        return Admission(
            row=self.row,
            prompt_token_ids=self.request.prompt_token_ids,
            output_token_ids=self.token_ids[self.num_prompt :],
            params=replace(params, min_tokens=self.min_tokens, grammar=None, reasoning_phase=None)
            if self.masked
            else params,
            seed=self.request.seed,
            eos_token_ids=self.eos_token_ids,
            adapter_slot=self.adapter_slot,
        )
