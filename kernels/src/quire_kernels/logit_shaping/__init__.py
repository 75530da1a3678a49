"""What requests do to their own logits before the draw, and the counts of drawn tokens that this needs.

Legend: N rows of state, C places in the pool, R rows of logits, S of them to shape, V vocabulary.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from quire_kernels.checks import check_dense, check_device, check_storage, refuse
from quire_kernels.dispatch import implementation

NUM_BOUNDS = 7
"""Of a row: where allowed, words, stops, biases and counted begin, where counted ends, and the room after it."""

TAIL = 64
"""How many of the tokens drawn last are known: a forbidden word has at most one more."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LogitEdits:
    """What each row asks for, kept from step to step. A row's edits lie side by side in a pool, in this order:

    allowed  ids in rising order, each once: where there are any, no other is drawn
    words    forbidden sequences: the number of their tokens, then these; the last is not drawn after the others
    stops    ids that are not drawn before ``min_tokens`` others
    biases   ids, and in ``values`` what is added to their logits
    counted  ids that occurred, and in ``values`` how often they were drawn; grows as tokens are drawn

    Every id is below V. Where the room for ``counted`` is empty, nothing is counted for the row.
    """

    ids: Tensor  # [C] int32
    values: Tensor  # [C] float32
    bounds: Tensor  # [N, NUM_BOUNDS] int64
    penalties: Tensor  # [N, 3] float32: repetition, frequency, presence; 1, 0 and 0 change nothing
    min_tokens: Tensor  # [N] int64
    num_drawn: Tensor  # [N] int64
    tails: Tensor  # [N, TAIL] int32: the n-th token drawn at n % TAIL, n from 0


def shape_logits(logits: Tensor, lines: Tensor, rows: Tensor, edits: LogitEdits) -> None:
    """Changes lines of ``logits`` in place, each as its row asks: what is forbidden becomes minus infinity.

    In this order: allowed ids, forbidden words, least length, biases, penalties. A token that occurred has its logit
    divided by ``repetition`` where that is positive, multiplied where it is not (Keskar et al., CTRL, 2019); then
    ``frequency`` is subtracted for each time it was drawn, and ``presence`` if it was.

    logits  [R, V] float32, rows at any stride
    lines   [S] int64, which rows of logits, each at most once
    rows    [S] int64, whose edits

    Raises ArgumentError on other shapes, strides or dtypes. What the pool holds is not checked.
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
    """Notes, in place, that each of ``token_ids`` [S] int64 was drawn for its row [S] int64, each row at most once.

    Raises ArgumentError on other shapes or dtypes, and on a CPU where a row has no room for another id: on a GPU that
    is the caller's to know.
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
