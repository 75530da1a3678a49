"""Reports of probabilities: of drawn tokens and their likeliest rivals, and of the tokens of prompts.

Legend: R rows of logits, V vocabulary, K reported, P prompt positions.
"""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from quire_engine.core.batch import Batch, PromptPositions, TokenLogprobs
from quire_kernels.logprobs import Logprobs, token_logprobs


def report(logits: Tensor, lines: np.ndarray, token_ids: np.ndarray, counts: np.ndarray) -> list[TokenLogprobs]:
    """For line ``lines[i]`` of logits [R, V] the token ``token_ids[i]`` and the ``counts[i]`` likeliest; all [K]."""
    found = token_logprobs(logits, torch.from_numpy(lines), torch.from_numpy(token_ids), most_of(counts, logits))
    return entries(found, token_ids.tolist(), counts)


def most_of(counts: np.ndarray, logits: Tensor) -> int:
    """How many likeliest tokens have to be found of each line."""
    return min(int(counts.max(initial=0)), logits.shape[1])


def entries(found: Logprobs, token_ids: list[int], counts: np.ndarray) -> list[TokenLogprobs]:
    """``found``, in host memory, as it is reported."""
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
    """Which tokens of a batch have logits: those whose successors are drawn, and positions of prompts to report."""

    rows: np.ndarray  # [R + P] int64, places in Batch.token_ids, rising
    sampled: np.ndarray  # [R] where in ``rows`` those are which are drawn from, in batch order
    reported: np.ndarray  # [P] the same of prompt positions, in the order of ``Batch.prompt_logprobs``


def logits_rows(batch: Batch) -> LogitsRows:
    scheduled = np.asarray(batch.num_scheduled, dtype=np.int64)
    ends = np.cumsum(scheduled)
    sampled = ends[np.asarray(batch.samples, dtype=np.bool_)] - 1
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


def report_prompts(batch: Batch, logits: Tensor, lines: np.ndarray) -> list[list[TokenLogprobs]]:
    """For each of ``Batch.prompt_logprobs`` its positions' next tokens; ``lines`` [P] says where their logits are."""
    if not batch.prompt_logprobs:
        return []
    asked = asked_of_prompts(batch.prompt_logprobs)
    return by_prompt(batch.prompt_logprobs, report(logits, lines, asked.token_ids, asked.counts))


@dataclass(frozen=True, slots=True, kw_only=True)
class AskedTokens:
    token_ids: np.ndarray  # [P] int64, the prompts' next tokens
    counts: np.ndarray  # [P] int64, how many likeliest to report beside each


def asked_of_prompts(asked: list[PromptPositions]) -> AskedTokens:
    lengths = [len(one.next_token_ids) for one in asked]
    return AskedTokens(
        token_ids=np.concatenate([np.asarray(one.next_token_ids, dtype=np.int64) for one in asked]),
        counts=np.repeat([one.num_logprobs for one in asked], lengths),
    )


def by_prompt(asked: list[PromptPositions], entries: list[TokenLogprobs]) -> list[list[TokenLogprobs]]:
    """The entries of all positions, one after another, cut where a prompt ends."""
    lengths = [len(one.next_token_ids) for one in asked]
    ends = np.cumsum(lengths).tolist()
    return [entries[end - length : end] for end, length in zip(ends, lengths, strict=True)]
