"""Reports of probabilities: of sampled tokens and the most probable tokens, and of prompt tokens.

They are computed on the device in a step, and read by the host after it.

Legend: R rows of logits, V vocabulary, Q reported lines of logits, P prompt positions.
"""

from dataclasses import dataclass

import numpy as np
from torch import Tensor

from quire_engine.core.batch import Batch, PromptPositions, TokenLogprobs
from quire_engine.runner.accelerator import Accelerator
from quire_engine.runner.staging import HostToDeviceBatch, Item
from quire_kernels.logprobs import Logprobs, token_logprobs


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


_NONE = np.zeros(0, dtype=np.int64)


@dataclass(slots=True, kw_only=True)
class LogitsRows:
    """The tokens of a batch that have logits: those whose successors are sampled, and prompt positions to report."""

    rows: np.ndarray  # [R + P] int64, places in Batch.token_ids, ascending
    sampled: np.ndarray  # [R] the places in ``rows`` that are sampled from, in batch order; drafts have their own
    reported: np.ndarray  # [P] the same for prompt positions, in the order of ``Batch.prompt_logprobs``


def logits_rows(batch: Batch, ends: np.ndarray) -> LogitsRows:
    """Return the tokens of a batch that have logits; ``ends`` [B] are those of ``StepColumns``."""
    sampled = ends[np.asarray(batch.samples, dtype=np.bool_)] - 1
    if batch.num_drafts:
        sampled = before_and_at_drafts(sampled, drafts_of_sampled(batch))
    if not batch.prompt_logprobs:
        return LogitsRows(rows=sampled, sampled=np.arange(len(sampled)), reported=_NONE)
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


@dataclass(frozen=True, slots=True, kw_only=True)
class AskedReport:
    places: Item  # [Q] int64
    counts: np.ndarray  # [Q] int64, the number of most probable tokens to report

    def launch(self, logits: Tensor, lines: Tensor, token_ids: Tensor) -> "PendingReport":
        """Launch the report of token ``token_ids[i]`` in line ``lines[i]`` of logits; both [Q] int64."""
        found = token_logprobs(logits, lines, token_ids, most_of(self.counts, logits))
        return PendingReport(found=found, token_ids=token_ids, counts=self.counts)


@dataclass(frozen=True, slots=True, kw_only=True)
class PendingReport:
    found: Logprobs
    token_ids: Tensor  # [Q] int64
    counts: np.ndarray

    def download(self, accelerator: Accelerator) -> "PendingReport":
        """Return a copy in host memory, which is complete when a later mark is reached."""
        found, fetch = self.found, accelerator.download
        return PendingReport(
            found=Logprobs(
                of_token=fetch(found.of_token),
                rank=fetch(found.rank),
                token_ids=fetch(found.token_ids),
                logprobs=fetch(found.logprobs),
            ),
            token_ids=fetch(self.token_ids),
            counts=self.counts,
        )

    def read(self) -> list[TokenLogprobs]:
        return entries(self.found, self.token_ids.tolist(), self.counts)


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptReport:
    """The report that a batch requests for its prompts."""

    asked: AskedReport
    token_ids: Item  # [Q] int64, the prompts' next tokens

    def launch(self, logits: Tensor) -> PendingReport:
        return self.asked.launch(logits, self.asked.places.on_device, self.token_ids.on_device)


def stage_prompt_report(batch: Batch, lines: np.ndarray, transfer: HostToDeviceBatch) -> PromptReport:
    """Return the report for lines [Q] of the step's logits, in the order of ``Batch.prompt_logprobs``."""
    asked = batch.prompt_logprobs
    lengths = [len(one.next_token_ids) for one in asked]
    token_ids = np.concatenate([np.asarray(one.next_token_ids, dtype=np.int64) for one in asked])
    counts = np.repeat([one.num_logprobs for one in asked], lengths)
    return PromptReport(asked=AskedReport(places=transfer.add(lines), counts=counts), token_ids=transfer.add(token_ids))


def spread(report: PendingReport | None, places: np.ndarray, count: int) -> list[TokenLogprobs | None] | None:
    """Return one entry per sampled token, at ``places`` [Q]; None if nothing is reported."""
    if report is None:
        return None
    spread_out: list[TokenLogprobs | None] = [None] * count
    for place, entry in zip(places.tolist(), report.read(), strict=True):
        spread_out[place] = entry
    return spread_out


def by_prompt(asked: list[PromptPositions], entries: list[TokenLogprobs]) -> list[list[TokenLogprobs]]:
    """Return the entries of all positions, split by prompt."""
    lengths = [len(one.next_token_ids) for one in asked]
    ends = np.cumsum(lengths).tolist()
    return [entries[end - length : end] for end, length in zip(ends, lengths, strict=True)]
