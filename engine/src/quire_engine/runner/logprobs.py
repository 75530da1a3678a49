"""Reports of probabilities: of sampled tokens and the most probable tokens, and of prompt tokens.

Legend: R rows of logits, V vocabulary, K reported, P prompt positions.
"""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from quire_engine.core.batch import Batch, PromptPositions, TokenLogprobs
from quire_kernels.logprobs import Logprobs, token_logprobs


def report(logits: Tensor, lines: np.ndarray, token_ids: np.ndarray, counts: np.ndarray) -> list[TokenLogprobs]:
    """Return the report of ``token_ids[i]`` and the ``counts[i]`` most probable ones in ``lines[i]``; all [K]."""
    found = token_logprobs(logits, torch.from_numpy(lines), torch.from_numpy(token_ids), most_of(counts, logits))
    return entries(found, token_ids.tolist(), counts)


def most_of(counts: np.ndarray, logits: Tensor) -> int:
    """Return the number of most probable tokens that must be found in each line."""
    return min(int(counts.max(initial=0)), logits.shape[1])


def entries(found: Logprobs, token_ids: list[int], counts: np.ndarray) -> list[TokenLogprobs]:
    """Return ``found``, which is in host memory, as report entries."""
    columns = zip(
        token_ids,
        found.of_token.tolist(),
        found.rank.tolist(),
        found.token_ids.tolist(),
        found.logprobs.tolist(),
        counts.tolist(),
        strict=True,
    )
    return [
        TokenLogprobs(token_ids=[token, *ids[:count]], logprobs=[logprob, *logprobs[:count]], rank=rank)
        for token, logprob, rank, ids, logprobs, count in columns
    ]


@dataclass(frozen=True, slots=True, kw_only=True)
class LogitsRows:
    """The tokens of a batch that have logits: those whose successors are sampled, and prompt positions to report."""

    rows: np.ndarray  # [R + P] int64, places in Batch.token_ids, ascending
    sampled: np.ndarray  # [R] the places in ``rows`` that are sampled from, in batch order; drafts have their own
    reported: np.ndarray  # [P] the same for prompt positions, in the order of ``Batch.prompt_logprobs``


def logits_rows(batch: Batch) -> LogitsRows:
    scheduled = np.asarray(batch.num_scheduled, dtype=np.int64)
    ends = np.cumsum(scheduled)
    sampled = ends[np.asarray(batch.samples, dtype=np.bool_)] - 1
    if batch.num_drafts:
        sampled = before_and_at_drafts(sampled, drafts_of_sampled(batch))
    if not batch.prompt_logprobs:
        return LogitsRows(rows=sampled, sampled=np.arange(len(sampled)), reported=np.zeros(0, dtype=np.int64))
    parts = []
    for asked in batch.prompt_logprobs:
        begin = (
            int(ends[asked.index]) - batch.num_scheduled[asked.index] + asked.first - batch.num_computed[asked.index]
        )
        parts.append(np.arange(begin, begin + len(asked.next_token_ids)))
    reported = np.concatenate(parts)
    rows = np.union1d(sampled, reported)
    return LogitsRows(rows=rows, sampled=np.searchsorted(rows, sampled), reported=np.searchsorted(rows, reported))


def drafts_of_sampled(batch: Batch) -> np.ndarray:
    """Return the number of drafts of each sequence that samples; ``Batch.num_drafts`` is not empty."""
    return np.asarray(batch.num_drafts, dtype=np.int64)[np.asarray(batch.samples, dtype=np.bool_)]


def before_and_at_drafts(last: np.ndarray, drafts: np.ndarray) -> np.ndarray:
    """Return for each sequence the places ``last - drafts`` to ``last``, all in one array."""
    counts = drafts + 1
    ends = np.cumsum(counts)
    return np.repeat(last - drafts - (ends - counts), counts) + np.arange(counts.sum())


def report_prompts(batch: Batch, logits: Tensor, lines: np.ndarray) -> list[list[TokenLogprobs]]:
    """Return the entries for each of ``Batch.prompt_logprobs``; ``lines`` [P] are the lines of their logits."""
    if not batch.prompt_logprobs:
        return []
    asked = asked_of_prompts(batch.prompt_logprobs)
    return by_prompt(batch.prompt_logprobs, report(logits, lines, asked.token_ids, asked.counts))


@dataclass(frozen=True, slots=True, kw_only=True)
class AskedTokens:
    token_ids: np.ndarray  # [P] int64, the prompts' next tokens
    counts: np.ndarray  # [P] int64, the number of most probable tokens to report


def asked_of_prompts(asked: list[PromptPositions]) -> AskedTokens:
    lengths = [len(one.next_token_ids) for one in asked]
    return AskedTokens(
        token_ids=np.concatenate([np.asarray(one.next_token_ids, dtype=np.int64) for one in asked]),
        counts=np.repeat([one.num_logprobs for one in asked], lengths),
    )


def by_prompt(asked: list[PromptPositions], entries: list[TokenLogprobs]) -> list[list[TokenLogprobs]]:
    """Return the entries of all positions, split by prompt."""
    lengths = [len(one.next_token_ids) for one in asked]
    ends = np.cumsum(lengths).tolist()
    return [entries[end - length : end] for end, length in zip(ends, lengths, strict=True)]
