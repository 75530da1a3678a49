"""A request, and the sequence of tokens that grows from it.

Only the scheduler changes a sequence. Its plain attributes are read once per step for every running sequence, so they
are stored ready to use (``num_tokens``, ``capacity``, ``limit``) instead of being computed on access.
"""

from dataclasses import dataclass, field, replace

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
    cache_salt: str | None = None
    adapter: int | None = None
    """The number of the adapter; None for the base model. Each load of an adapter has a number of its own."""
    parent: int | None = None
    """The key of the first sequence of the same client request (n > 1), which computes their common prompt."""
    output_token_ids: list[int] = field(default_factory=list)
    """The tokens that another engine has sampled; this one continues after them."""


class Sequence:
    """The tokens of a request and the blocks that hold their keys and values.

    ``token_ids``     the known tokens of prompt and output.
    ``num_tokens``    the known tokens and the pending samples (``num_pending``, scheduled but not committed).
    ``num_computed``  tokens whose keys and values are in the cache, or will be after the steps in flight.
    ``num_assumed``   the drafts in flight that these three count as accepted, because the next step is scheduled.
    ``num_prefill``   tokens to compute before it decodes: its prompt, and what preemptions discarded.
    ``limit``         tokens at which the sequence ends in any case; the last one is sampled but never computed.
    ``capacity``      tokens that the block tables cover, including those that left a window.
    ``block_tables``  per KV cache group the blocks held, ``first_blocks`` the place of the first one: 0 unless a
                      sliding window has moved on.
    ``num_to_report`` prompt tokens whose successors' logprobs are requested, or that are pooled; ``num_reported``
                      those that have been reported or need not be, or will be by the steps in flight: a cached prefix
                      ends before the others.
    ``swap_tables``   per group the host blocks of a preempted sequence that was swapped out, else None: they hold
                      ``num_computed`` tokens from ``first_blocks`` on. Other waiting sequences have computed none.
    ``num_lost``      tokens that had been computed when it was last preempted by recompute.
    ``family``        a number that it shares with those that share its prompt, where they are to find it: None where
                      it has no such siblings, or prefixes are found by all.
    ``parent``        with which it is parked until the parent's prompt is there (``forks``), else None.
    ``constrained``   whether a grammar says which tokens it may sample, and when it ends.
    ``masked``        whether masks may forbid tokens, for a grammar or for a budget of reasoning.
    ``row``           its place in the runner while it runs, else None.
    ``adapter_slot``  the slot of its adapter while it runs; -1 for the base model.
    """

    __slots__ = (
        "adapter_slot",
        "block_tables",
        "capacity",
        "constrained",
        "digests",
        "eos_token_ids",
        "family",
        "finished",
        "first_blocks",
        "key",
        "limit",
        "masked",
        "num_assumed",
        "num_cached",
        "num_computed",
        "num_lost",
        "num_pending",
        "num_preemptions",
        "num_prefill",
        "num_prompt",
        "num_published",
        "num_reported",
        "num_to_report",
        "num_tokens",
        "order",
        "parent",
        "request",
        "row",
        "stop_ids",
        "swap_tables",
        "token_ids",
    )

    def __init__(
        self, request: Request, *, order: Order, limit: int, eos_token_ids: tuple[int, ...], num_groups: int
    ) -> None:
        params = request.params
        self.request = request
        self.key = request.key
        self.order = order
        self.limit = limit
        self.eos_token_ids = eos_token_ids
        self.constrained = params.grammar is not None
        self.masked = self.constrained or params.reasoning_phase is not None
        ignores_eos = params.ignore_eos and not self.constrained
        self.stop_ids = frozenset(params.stop_token_ids if ignores_eos else (*params.stop_token_ids, *eos_token_ids))
        self.token_ids = [*request.prompt_token_ids, *request.output_token_ids]
        self.num_prompt = len(request.prompt_token_ids)
        self.num_prefill = len(self.token_ids)
        self.num_tokens = self.num_prefill
        self.num_pending = 0
        self.num_assumed = 0
        self.num_computed = 0
        self.num_cached = 0
        self.num_preemptions = 0
        self.num_lost = 0
        self.num_reported = 0
        self.num_to_report = 0 if params.prompt_logprobs is None else self.num_prompt - 1
        if params.pooling is not None:
            self.num_to_report = self.num_prompt
            self.num_reported = 0 if params.pooling.mean else self.num_prompt - 1
        self.finished = False
        self.row: int | None = None
        self.adapter_slot = -1
        self.capacity = 0
        self.block_tables: list[list[int]] = [[] for _ in range(num_groups)]
        self.first_blocks = [0] * num_groups
        self.digests: list[bytes] = []
        self.num_published = 0
        self.swap_tables: list[list[int]] | None = None
        self.family: int | None = None
        self.parent: Sequence | None = None

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

    def assume_accepted(self, drafts: int) -> None:
        """Count so many drafts in flight as accepted; a negative number takes that back."""
        self.num_assumed += drafts
        self.num_computed += drafts
        self.num_tokens += drafts
        self.num_pending += drafts

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
