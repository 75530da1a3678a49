"""What requests do to their own logits before the draw, kept by row from admission to release.

Allowed ids, forbidden words, least length, biases and penalties become a row's *edits*: five lists of token ids side by
side in one pool (see ``quire_kernels.logit_shaping``). A step names the rows to shape and the tokens that were drawn;
one kernel launch each does the rest, so no row is visited here. Only the list of tokens that occurred grows; a row
whose room may be used up is moved to a larger place, which happens once in many steps.

Rows that ask for nothing cost nothing.
"""

from dataclasses import dataclass
from itertools import chain

import numpy as np
import torch
from torch import Tensor

from quire_engine.core.batch import Admission
from quire_engine.core.sampling_params import SamplingParams
from quire_kernels.logit_shaping import NUM_BOUNDS, TAIL, LogitEdits, count_tokens, shape_logits

_ROOM = 64
"""Places for tokens that have not occurred yet: at least so many steps until a row is looked at again."""


class LogitShaping:
    def __init__(self, *, max_rows: int, vocab_size: int) -> None:
        self._vocab_size = vocab_size
        self._shaped = np.zeros(max_rows, dtype=np.bool_)
        self._counted = np.zeros(max_rows, dtype=np.bool_)
        self._sure_room = np.zeros(max_rows, dtype=np.int64)
        """How many more tokens a counted row surely has room for: known without reading what a device wrote."""
        self._ids = np.zeros(0, dtype=np.int32)
        self._values = np.zeros(0, dtype=np.float32)
        self._end = 0
        self._bounds = np.zeros((max_rows, NUM_BOUNDS), dtype=np.int64)
        self._penalties = np.ones((max_rows, 3), dtype=np.float32)
        self._min_tokens = np.zeros(max_rows, dtype=np.int64)
        self._num_drawn = np.zeros(max_rows, dtype=np.int64)
        self._tails = np.zeros((max_rows, TAIL), dtype=np.int32)
        self._edits = self._as_tensors()

    def admit(self, admission: Admission) -> None:
        """A sequence takes its row, anew or after a preemption: its edits hold what it has drawn so far."""
        row, drawn = admission.row, admission.output_token_ids
        self.release(row)
        edits = row_edits(admission, self._vocab_size)
        if edits is None:
            return
        room = _ROOM if edits.penalised else 0
        ids = np.concatenate(edits.ids)
        begin = self._take(len(ids) + room)
        self._shaped[row], self._counted[row], self._sure_room[row] = True, edits.penalised, room
        self._ids[begin : begin + len(ids)] = ids
        self._values[begin : begin + len(ids)] = edits.values
        ends = begin + np.cumsum([len(part) for part in edits.ids])
        self._bounds[row] = [begin, *ends, ends[-1] + room]
        params = admission.params
        self._penalties[row] = params.repetition_penalty, params.frequency_penalty, params.presence_penalty
        self._min_tokens[row] = params.min_tokens
        self._num_drawn[row] = len(drawn)
        places = np.arange(max(0, len(drawn) - TAIL), len(drawn))
        self._tails[row, places % TAIL] = drawn[-TAIL:]

    def release(self, row: int) -> None:
        self._shaped[row] = self._counted[row] = False

    def shaped(self, rows: np.ndarray) -> np.ndarray:
        """[S] the places in ``rows`` of those with edits."""
        return np.flatnonzero(self._shaped[rows])

    def apply(self, logits: Tensor, lines: np.ndarray, rows: np.ndarray) -> None:
        """Changes float32 logits [R, V] in place: line ``lines[i]`` as row ``rows[i]`` asks."""
        shape_logits(logits, torch.from_numpy(lines), torch.from_numpy(rows), self._edits)

    def count(self, token_ids: np.ndarray, rows: np.ndarray) -> None:
        """A token was drawn for each of ``rows``, all of which have edits."""
        used_up = rows[self._counted[rows] & (self._sure_room[rows] == 0)]
        for row in used_up.tolist():
            self._make_room(row)
        self._sure_room[rows] -= 1
        count_tokens(torch.from_numpy(token_ids), torch.from_numpy(rows), self._edits)

    # --- the pool ---

    def _make_room(self, row: int) -> None:
        """Tokens that were drawn again have left room; where that is not much, the row moves to where there is more."""
        begin, end, room = (int(self._bounds[row, place]) for place in (0, 5, 6))
        if room - end < _ROOM // 2:
            size = end - begin
            # Half as much again, so that a long answer moves seldom.
            wanted = size + max(_ROOM, size // 2)
            target = self._take(wanted)
            begin = int(self._bounds[row, 0])  # taking a place may have moved it
            self._move(self._ids, self._values, row, target, size)
            self._bounds[row] += target - begin
            self._bounds[row, 6] = target + wanted
        self._sure_room[row] = self._bounds[row, 6] - self._bounds[row, 5]

    def _take(self, size: int) -> int:
        """The beginning of ``size`` places after all others."""
        if self._end + size > len(self._ids):
            self._pack(size)
        begin, self._end = self._end, self._end + size
        return begin

    def _pack(self, wanted: int) -> None:
        """A pool of rows side by side, twice as large as they are, with ``wanted`` more places."""
        rows = np.flatnonzero(self._shaped & (self._bounds[:, 6] > self._bounds[:, 0]))
        sizes = self._bounds[rows, 6] - self._bounds[rows, 0]
        old = self._ids, self._values
        capacity = max(1024, 2 * (int(sizes.sum()) + wanted))
        self._ids, self._values = np.zeros(capacity, dtype=np.int32), np.zeros(capacity, dtype=np.float32)
        self._end = 0
        for row, size in zip(rows.tolist(), sizes.tolist(), strict=True):
            self._move(*old, row, self._end, size)
            self._bounds[row] += self._end - self._bounds[row, 0]
            self._end += size
        self._edits = self._as_tensors()

    def _move(self, ids: np.ndarray, values: np.ndarray, row: int, target: int, size: int) -> None:
        """Copy a row's places from an old pool, or this one, to ``target``; its bounds are the caller's."""
        begin = int(self._bounds[row, 0])
        self._ids[target : target + size] = ids[begin : begin + size]
        self._values[target : target + size] = values[begin : begin + size]

    def _as_tensors(self) -> LogitEdits:
        """The same memory."""
        return LogitEdits(
            ids=torch.from_numpy(self._ids),
            values=torch.from_numpy(self._values),
            bounds=torch.from_numpy(self._bounds),
            penalties=torch.from_numpy(self._penalties),
            min_tokens=torch.from_numpy(self._min_tokens),
            num_drawn=torch.from_numpy(self._num_drawn),
            tails=torch.from_numpy(self._tails),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class RowEdits:
    """``ids`` are allowed, words, stops, biases and counted; ``values`` belongs to all of them, one after another."""

    ids: tuple[np.ndarray, ...]
    values: np.ndarray
    penalised: bool


def row_edits(admission: Admission, vocab_size: int) -> RowEdits | None:
    """None when the request leaves its logits as they are. Ids beyond the vocabulary change nothing."""
    params, drawn = admission.params, admission.output_token_ids
    penalised = _is_penalised(params)
    shorter = params.min_tokens > len(drawn)
    if not (
        penalised or shorter or params.logit_bias or params.bad_words_token_ids or params.allowed_token_ids is not None
    ):
        return None
    stops = (*params.stop_token_ids, *(() if params.ignore_eos else admission.eos_token_ids)) if shorter else ()
    biases = {token: bias for token, bias in params.logit_bias if token < vocab_size}
    occurred, counts = _occurrences(admission, vocab_size) if penalised else (_ids(()), np.zeros(0))
    parts = (
        np.unique(_ids(token for token in params.allowed_token_ids or () if token < vocab_size)),
        _encoded_words(params.bad_words_token_ids, vocab_size),
        _ids(token for token in stops if token < vocab_size),
        _ids(biases),
        occurred,
    )
    values = np.zeros(sum(map(len, parts)), dtype=np.float32)
    values[len(values) - len(occurred) - len(biases) :] = [*biases.values(), *counts]
    return RowEdits(ids=parts, values=values, penalised=penalised)


def _is_penalised(params: SamplingParams) -> bool:
    return bool(params.presence_penalty or params.frequency_penalty or params.repetition_penalty != 1.0)


def _occurrences(admission: Admission, vocab_size: int) -> tuple[np.ndarray, np.ndarray]:
    """The ids that occurred, and how often each was drawn."""
    prompt, drawn = np.asarray(admission.prompt_token_ids), np.asarray(admission.output_token_ids, dtype=np.int64)
    occurred, places = np.unique(np.concatenate((prompt, drawn)), return_inverse=True)
    counts = np.bincount(places[len(prompt) :], minlength=len(occurred))
    known = occurred < vocab_size
    return occurred[known].astype(np.int32), counts[known]


def _encoded_words(words: tuple[tuple[int, ...], ...], vocab_size: int) -> np.ndarray:
    usable = [word for word in words if 0 < len(word) <= TAIL + 1 and max(word) < vocab_size]
    return _ids(chain.from_iterable((len(word), *word) for word in usable))


def _ids(tokens: object) -> np.ndarray:
    return np.fromiter(tokens, dtype=np.int32)  # type: ignore[call-overload]
