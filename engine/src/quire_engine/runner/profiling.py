"""The memory of the largest step and the largest CUDA graph, measured before the KV cache is allocated.

The step is the largest that the scheduler may create: all sequences, all tokens, as many prompt tokens reported as a
step may report, and every sampling parameter set. An engine that speculates runs a second one, with as many drafts as
a step may verify. They run on a cache of a few blocks, which all their tokens overwrite: their results are discarded.
"""

import gc
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Protocol

import torch

from quire_engine.core.batch import Admission, Batch, BlockUpdates, PromptPositions
from quire_engine.core.kv_layout import KVCacheLayout
from quire_engine.core.options import MAX_PROMPT_LOGPROBS_POSITIONS
from quire_engine.core.ports import Runner
from quire_engine.core.sampling_params import every_parameter


class CapturingRunner(Runner, Protocol):
    def capture_graphs(self, captured: Callable[[], None]) -> None: ...


class Meter(Protocol):
    """A meter of the device's memory."""

    def free(self) -> int:
        """Return the free bytes when all issued work is done."""
        ...

    def settle(self) -> None:
        """Release the memory that is cached for reuse."""
        ...


@dataclass(frozen=True, slots=True)
class CudaMeter:
    device: torch.device

    def free(self) -> int:
        torch.cuda.synchronize(self.device)
        return torch.cuda.mem_get_info(self.device)[0]

    def settle(self) -> None:
        gc.collect()
        torch.cuda.synchronize(self.device)
        torch.cuda.empty_cache()


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceMemory:
    meter: Meter
    total: int
    """The bytes, as in the next field."""
    free_before: int
    """The bytes before anything was loaded, but with CUDA's own allocations."""


def device_memory(device: torch.device) -> DeviceMemory:
    """Return the current memory of a device."""
    free, total = torch.cuda.mem_get_info(device)
    return DeviceMemory(meter=CudaMeter(device), total=total, free_before=free)


@dataclass(frozen=True, slots=True, kw_only=True)
class Profile:
    """The results of profiling, in bytes."""

    free: int
    """The free bytes while everything that the step allocated is held."""
    activations: int
    graphs: tuple[int, ...]
    """The bytes of each captured graph, in the order of their capture."""


def profile(
    make_runner: Callable[[], CapturingRunner], batches: Sequence[Batch], meter: Meter, *, captures: bool
) -> Profile:
    """Run the largest steps. ``make_runner`` creates a runner of the final size, with the largest graphs only."""
    meter.settle()
    before = meter.free()
    runner = make_runner()
    try:
        for batch in batches:
            runner.execute(batch).sample().wait()
        after = meter.free()
        left: list[int] = []

        def measure() -> None:
            # Capturing releases the cached memory, which would hide a graph's own.
            meter.settle()
            left.append(meter.free())

        if captures:
            measure()
            runner.capture_graphs(measure)
    finally:
        runner.close()
    graphs = tuple(max(0, earlier - later) for earlier, later in pairwise(left))
    return Profile(free=after, activations=max(0, before - after), graphs=graphs)


def largest_step(
    layout: KVCacheLayout,
    *,
    sequences: int,
    tokens: int,
    max_model_len: int,
    vocab_size: int,
    logprobs: int,
    adapter_slots: int = 0,
    drafts: int = 0,
) -> Batch:
    """Return a batch of ``tokens`` in ``sequences``, which use all ``adapter_slots``.

    ``layout`` may have fewer blocks than they need. Up to ``drafts`` of the tokens are drafts; they are known to follow
    another token, and no parameter depends on earlier samples.
    """
    assert 0 < sequences <= tokens
    computed = 1 if drafts else 0
    even, more = divmod(min(tokens, sequences * (max_model_len - computed)), sequences)
    lengths = [even + (row < more) for row in range(sequences)]
    rows = list(range(sequences))
    reported = min(logprobs, vocab_size)
    verified = _shares(lengths, drafts)
    positions = _reported_positions([length - count for length, count in zip(lengths, verified, strict=True)])
    params = every_parameter(top_k=max(1, vocab_size // 2), logprobs=reported)
    if drafts:
        params = replace(
            params,
            presence_penalty=0.0,
            frequency_penalty=0.0,
            repetition_penalty=1.0,
            bad_words_token_ids=(),
            min_tokens=0,
        )
    return Batch(
        step=0,
        rows=rows,
        num_computed=[computed] * sequences,
        num_scheduled=lengths,
        token_ids=[0] * sum(lengths),
        samples=[True] * sequences,
        feedback_tokens=[],
        admitted=[
            Admission(
                row=row,
                prompt_token_ids=[0] * (computed + length),
                output_token_ids=[],
                params=params,
                seed=row,
                eos_token_ids=(0,),
                adapter_slot=row % adapter_slots if adapter_slots else -1,
            )
            for row, length in zip(rows, lengths, strict=True)
        ],
        block_updates=tuple(
            _wrapped_blocks([computed + length for length in lengths], group.num_blocks, layout.block_size)
            for group in layout.groups
        ),
        released_rows=rows,
        prompt_logprobs=[
            PromptPositions(index=row, first=computed, next_token_ids=[0] * count, num_logprobs=reported)
            for row, count in zip(rows, positions, strict=True)
            if count
        ],
        num_drafts=verified if drafts else [],
    )


def _shares(lengths: list[int], drafts: int) -> list[int]:
    """Return the number of drafts of each sequence: about as many of each, and fewer than its tokens."""
    shares = []
    for place, length in enumerate(lengths):
        shares.append(min(length - 1, -(-drafts // (len(lengths) - place))))
        drafts -= shares[-1]
    return shares


def _reported_positions(lengths: list[int]) -> list[int]:
    """Return the reported positions of each prompt: together the most that one step of the scheduler may have.

    The scheduler bounds their sum, but always grants a sequence one.
    """
    left = MAX_PROMPT_LOGPROBS_POSITIONS
    counts = []
    for length in lengths:
        counts.append(min(length - 1, max(1, left)))
        left -= counts[-1]
    return counts


def _wrapped_blocks(lengths: list[int], num_blocks: int, block_size: int) -> BlockUpdates:
    """Return updates that use the few blocks repeatedly."""
    counts = [-(-length // block_size) for length in lengths]
    return BlockUpdates(
        rows=[row for row, count in enumerate(counts) for _ in range(count)],
        positions=[position for count in counts for position in range(count)],
        blocks=[place % num_blocks for place in range(sum(counts))],
    )
