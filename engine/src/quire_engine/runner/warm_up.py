"""The warm-up: every kind of step runs once, so that no request waits for compilation, and costs are measured.

It runs a prompt longer than a short query, one more token with every sampling parameter set, one greedy token and, if
kernels are compiled for them, a few chunks of few tokens. The measured times are the scheduler's initial values.
"""

from dataclasses import dataclass

from quire_engine.core.batch import Admission, Batch, BlockCopies, BlockUpdates, RunnerOutput
from quire_engine.core.kv_layout import KVCacheLayout
from quire_engine.core.ports import Runner
from quire_engine.core.sampling_params import SamplingParams, every_parameter
from quire_engine.core.stall_bound import StepCosts

SHORT_CHUNKS = (2, 4, 8, 16)
"""Chunk sizes in tokens: Triton's attention has a kernel for each power of two up to its longest short query."""
_PROMPT_TOKENS = 24
_SAMPLED = every_parameter(top_k=2, logprobs=1)
_GREEDY = SamplingParams(max_tokens=2, temperature=0.0)
# A timed chunk takes about this long, because a large model must not delay the start.
_TIMED_SECONDS = 0.1
_TIMED_TOKENS = 512
# The context that the tokens of a timed chunk see.
_TIMED_CONTEXT = 4096
_LEAST_PAIR_SHARE = 1e-5
_TIMED_COPY_BYTES = 16 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    step_costs: StepCosts
    swap_bytes_per_second: float | None
    """The rate in either direction; None without swap space."""


def warm_up(
    runner: Runner,
    layout: KVCacheLayout,
    *,
    max_model_len: int,
    max_tokens: int,
    block_bytes: tuple[int, ...],
    chunks: tuple[int, ...] = (),
) -> Measured:
    """Run the steps, and return the measured costs. No row stays taken, and the written blocks are still unused.

    ``max_tokens`` bounds a step, ``block_bytes`` are the bytes of a block per group; ``chunks`` are numbers of tokens
    to run in addition.
    """
    steps = _Steps(runner, layout)
    prompt = max(1, min(_PROMPT_TOKENS, max_model_len - 1, max_tokens))
    for params in (_SAMPLED, _GREEDY):
        filled = steps.prefill(prompt, params)
        drawn = steps.go_on(prompt, 1) if max_model_len > prompt else filled
    for chunk in chunks:
        steps.go_on(0, min(chunk, max_model_len, max_tokens))
    room = min(group.num_blocks for group in layout.groups) * layout.block_size
    longest = min(_TIMED_TOKENS, max_model_len - 1, max_tokens, room)
    return Measured(
        step_costs=_time_prompts(
            steps,
            fixed=_model_seconds(drawn),
            tokens=max(prompt, min(longest, int(_TIMED_SECONDS * prompt / _model_seconds(filled)))),
            max_model_len=max_model_len,
        ),
        swap_bytes_per_second=_time_copies(steps, layout, block_bytes),
    )


def _time_prompts(steps: "_Steps", *, fixed: float, tokens: int, max_model_len: int) -> StepCosts:
    """Return the costs from a chunk at the start of a prompt, and one as far behind it as the model allows."""
    begun = max(_model_seconds(steps.prefill(tokens, _GREEDY)) - fixed, 1e-9) / tokens
    start = min(_TIMED_CONTEXT, max_model_len - tokens)
    # The first access to pages of the cache is slow, which is not part of the cost of attention.
    steps.go_on(start + tokens - 1, 1)
    later = max(_model_seconds(steps.go_on(start, tokens)) - fixed, 1e-9) / tokens
    # The first chunk saw half of itself on average. A measured 0 would never be corrected.
    per_pair = max((later - begun) / max(1, start), begun * _LEAST_PAIR_SHARE)
    return StepCosts(fixed=fixed, per_token=max(begun - per_pair * tokens / 2, begun / 2), per_pair=per_pair)


def _time_copies(steps: "_Steps", layout: KVCacheLayout, block_bytes: tuple[int, ...]) -> float | None:
    counts = [
        min(group.num_blocks, group.num_swap_blocks, max(1, _TIMED_COPY_BYTES // size))
        for group, size in zip(layout.groups, block_bytes, strict=True)
    ]
    if not all(counts):
        return None
    copies = tuple(BlockCopies(sources=list(range(count)), targets=list(range(count))) for count in counts)
    steps.prefill(1, _GREEDY, swap_out=copies)  # the first touch of the pages
    out = steps.prefill(1, _GREEDY, swap_out=copies)
    back = steps.prefill(1, _GREEDY, swap_in=copies)
    total = 2 * sum(count * size for count, size in zip(counts, block_bytes, strict=True))
    return total / max(1e-9, out.swap_seconds + back.swap_seconds)


def _model_seconds(output: RunnerOutput) -> float:
    return max(1e-9, output.prepare_seconds + output.run_seconds + output.sample_seconds)


class _Steps:
    """Steps of the one sequence in row 0, which each prefill restarts."""

    def __init__(self, runner: Runner, layout: KVCacheLayout) -> None:
        self._runner = runner
        self._layout = layout
        self._number = 0
        self._drawn = 0

    def prefill(
        self,
        length: int,
        params: SamplingParams,
        *,
        swap_out: tuple[BlockCopies, ...] = (),
        swap_in: tuple[BlockCopies, ...] = (),
    ) -> RunnerOutput:
        tokens = [0] * length
        admission = Admission(
            row=0, prompt_token_ids=tokens, output_token_ids=[], params=params, seed=0, eos_token_ids=()
        )
        return self._run(0, tokens, [admission], swap_out, swap_in)

    def go_on(self, computed: int, count: int) -> RunnerOutput:
        """Run ``count`` tokens after ``computed`` tokens, whether or not those were computed."""
        return self._run(computed, [self._drawn] * count, [], (), ())

    def _run(
        self,
        computed: int,
        token_ids: list[int],
        admitted: list[Admission],
        swap_out: tuple[BlockCopies, ...],
        swap_in: tuple[BlockCopies, ...],
    ) -> RunnerOutput:
        blocks = -(-(computed + len(token_ids)) // self._layout.block_size)
        updates = tuple(
            BlockUpdates(
                rows=[0] * blocks,
                positions=list(range(blocks)),
                blocks=[place % group.num_blocks for place in range(blocks)],
            )
            for group in self._layout.groups
        )
        batch = Batch(
            step=self._number,
            rows=[0],
            num_computed=[computed],
            num_scheduled=[len(token_ids)],
            token_ids=token_ids,
            samples=[True],
            feedback_tokens=[],
            admitted=admitted,
            block_updates=updates,
            released_rows=[0] if admitted else [],
            swap_out=swap_out,
            swap_in=swap_in,
        )
        self._number += 1
        output = self._runner.execute(batch).sample().wait()
        self._drawn = output.token_ids[0]
        return output
