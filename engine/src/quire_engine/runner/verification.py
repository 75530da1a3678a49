"""The tokens that a step samples, and their comparison with the drafts that it computed.

A sequence with k drafts has 1 + k lines of logits, at its last known token and at each draft, and a token is sampled
from each. The accepted drafts are those before the first that differs from the token sampled in its place.

Legend: B sequences that sample, K sampled tokens: the sum of the drafts and B.
"""

from dataclasses import dataclass

import numpy as np

from quire_engine.core.batch import Batch
from quire_engine.runner.inputs import StepColumns
from quire_engine.runner.logprobs import before_and_at_drafts, drafts_of_sampled


@dataclass(slots=True, kw_only=True)
class Draws:
    """The tokens to sample in a step, in the order of the lines of logits."""

    rows: np.ndarray  # [K] int64
    positions: np.ndarray  # [K] int64: of the sampled tokens in their sequences


def draws_of(batch: Batch, columns: StepColumns) -> Draws:
    """Return the tokens that a batch samples; a sequence with drafts occurs once more for each of them."""
    sampled = np.asarray(batch.samples, dtype=np.bool_)
    rows, positions = columns.rows[sampled], columns.contexts[sampled]
    if batch.num_drafts:
        drafts = drafts_of_sampled(batch)
        rows, positions = np.repeat(rows, drafts + 1), before_and_at_drafts(positions, drafts)
    return Draws(rows=rows, positions=positions)


@dataclass(frozen=True, slots=True, kw_only=True)
class Verified:
    """The sampled tokens that a step keeps."""

    counts: np.ndarray  # [B] int64, the accepted drafts of each sequence and the token after them
    kept: np.ndarray  # int64, the places of all these tokens among the K sampled ones
    last: np.ndarray  # [B] int64, the place of each sequence's last one


def verified(batch: Batch, sampled: np.ndarray, token_ids: np.ndarray, places: np.ndarray) -> Verified:
    """Return what a batch with drafts keeps of ``sampled``; the arguments are those of ``verify``."""
    drafts = drafts_of_sampled(batch)
    counts = verify(sampled, token_ids, places, drafts)
    last = np.cumsum(drafts + 1) - (drafts + 1) + counts - 1
    return Verified(counts=counts, kept=before_and_at_drafts(last, counts - 1), last=last)


def verify(sampled: np.ndarray, token_ids: np.ndarray, places: np.ndarray, drafts: np.ndarray) -> np.ndarray:
    """Return the number of tokens that each sequence gains: its accepted drafts and the token sampled after them.

    sampled    [K] int64, the tokens sampled at the last token and at each draft of each sequence
    token_ids  [T] int64, the inputs of the step
    places     [K] int64, the place in ``token_ids`` after which each token was sampled
    drafts     [B] int64, the drafts of each sequence
    """
    counts = drafts + 1
    ends = np.cumsum(counts)
    following = token_ids[np.minimum(places + 1, len(token_ids) - 1)]
    differs = sampled != following
    differs[ends - 1] = True  # after the last draft there is nothing to differ from
    first = np.minimum.reduceat(np.where(differs, np.arange(len(sampled)), len(sampled)), ends - counts)
    return first - (ends - counts) + 1
