"""Changes of the logits that requests specify, and the counts of sampled tokens that these need.

Legend: N rows of state, C places in the pool, R rows of logits, S of them to shape, V vocabulary.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from quire_kernels.checks import check_dense, check_device, check_storage, refuse
from quire_kernels.dispatch import implementation

NUM_BOUNDS = 7
"""The bounds of a row: the starts of allowed, words, stops, biases and counted, the end of counted, and the end of the
room after it."""

TAIL = 64
"""The number of last sampled tokens that are kept: a forbidden word has at most one token more."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LogitEdits:
    """The logit changes of each row, kept from step to step.

    A row's edits are adjacent in a pool, in this order:

    allowed  ids in ascending order, each once: if there are any, no other id is sampled
    words    forbidden sequences: the number of tokens, then the tokens; the last one is not sampled after the others
    stops    ids that are not sampled before ``min_tokens`` other tokens
    biases   ids, and in ``values`` the numbers added to their logits
    counted  ids that occurred, and in ``values`` how often they were sampled; grows with each sampled token

    Every id is below V. If the room for ``counted`` is empty, nothing is counted for the row.
    """

    ids: Tensor  # [C] int32
    values: Tensor  # [C] float32
    bounds: Tensor  # [N, NUM_BOUNDS] int64
    penalties: Tensor  # [N, 3] float32: repetition, frequency, presence; 1, 0 and 0 change nothing
    min_tokens: Tensor  # [N] int64
    num_drawn: Tensor  # [N] int64
    tails: Tensor  # [N, TAIL] int32: the n-th sampled token at n % TAIL, n from 0


def shape_logits(logits: Tensor, lines: Tensor, rows: Tensor, edits: LogitEdits) -> None:
    """Change rows of ``logits`` in place according to their edits; forbidden tokens get minus infinity.

    The order is: allowed ids, forbidden words, minimum length, biases, penalties. The logit of a token that occurred is
    divided by ``repetition`` if it is positive, and multiplied otherwise (Keskar et al., CTRL, 2019). Then
    ``frequency`` is subtracted for each time it was sampled, and ``presence`` once if it was sampled.

    logits  [R, V] float32, rows at any stride
    lines   [S] int64, the rows of logits, each at most once
    rows    [S] int64, the rows of edits

    Raise ArgumentError on other shapes, strides or dtypes. The content of the pool is not checked.
    """
    check_storage("shape_logits", "logits", logits)
    if logits.dim() != 2 or logits.dtype != torch.float32:
        refuse("shape_logits", "logits", f"are {logits.dtype} {tuple(logits.shape)}; float32 [rows, vocabulary] needed")
    check_dense("shape_logits", "rows", rows, torch.int64, (lines.shape[0],))
    check_dense("shape_logits", "lines", lines, torch.int64, (rows.shape[0],))
    check_device("shape_logits", logits, lines=lines, rows=rows)
    _check_edits("shape_logits", edits, logits)
    implementation("logit_shaping", logits.device.type).shape_logits(logits, lines, rows, edits)


def count_tokens(token_ids: Tensor, rows: Tensor, edits: LogitEdits) -> None:
    """Count in place that each of ``token_ids`` [S] int64 was sampled for its row [S] int64, each row at most once.

    Raise ArgumentError on other shapes or dtypes and, on a CPU, if a row has no room for another id. On a GPU the
    caller must ensure the room.
    """
    check_dense("count_tokens", "rows", rows, torch.int64, (token_ids.shape[0],))
    check_dense("count_tokens", "token_ids", token_ids, torch.int64, (rows.shape[0],))
    check_device("count_tokens", token_ids, rows=rows)
    _check_edits("count_tokens", edits, token_ids)
    if not implementation("logit_shaping", token_ids.device.type).count_tokens(token_ids, rows, edits):
        refuse("count_tokens", "edits", "have a row without room for another id")


def _check_edits(op: str, edits: LogitEdits, like: Tensor) -> None:
    check_device(op, like, ids=edits.ids, values=edits.values, bounds=edits.bounds, penalties=edits.penalties)
    check_device(op, like, min_tokens=edits.min_tokens, num_drawn=edits.num_drawn, tails=edits.tails)
    places, rows = edits.ids.shape, (edits.bounds.shape[0],)
    check_dense(op, "ids", edits.ids, torch.int32, tuple(places))
    check_dense(op, "values", edits.values, torch.float32, tuple(places))
    check_dense(op, "bounds", edits.bounds, torch.int64, (*rows, NUM_BOUNDS))
    check_dense(op, "penalties", edits.penalties, torch.float32, (*rows, 3))
    check_dense(op, "min_tokens", edits.min_tokens, torch.int64, rows)
    check_dense(op, "num_drawn", edits.num_drawn, torch.int64, rows)
    check_dense(op, "tails", edits.tails, torch.int32, (*rows, TAIL))
