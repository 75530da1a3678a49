"""The changes of logits that requests specify, kept by row from admission to release.

Allowed ids, forbidden words, minimum length, biases and penalties become a row's *edits*: five adjacent lists of token
ids in one pool (see ``quire_kernels.logit_shaping``). A step names the rows to shape and the sampled tokens; one kernel
launch each does the rest, so no row is visited here. Only the list of tokens that occurred grows. A row whose room may
be used up moves to a larger place, which happens once in many steps.

Rows without edits cost nothing.
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
"""The places for tokens that have not occurred yet: at least this many steps until a row is checked again."""


class LogitShaping:
    def __init__(self, *, max_rows: int, vocab_size: int) -> None:
        self._vocab_size = vocab_size
        self._shaped = np.zeros(max_rows, dtype=np.bool_)
        self._counted = np.zeros(max_rows, dtype=np.bool_)
        self._sure_room = np.zeros(max_rows, dtype=np.int64)
        """The number of further tokens for which a counted row certainly has room, known without reading device memory.
        """
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
        """Set the edits of a sequence that takes its row; after a preemption they include its sampled tokens."""
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
        """Return [S] the places in ``rows`` of those with edits."""
        return np.flatnonzero(self._shaped[rows])

    def apply(self, logits: Tensor, lines: np.ndarray, rows: np.ndarray) -> None:
        """Change float32 logits [R, V] in place: line ``lines[i]`` by the edits of row ``rows[i]``."""
        shape_logits(logits, torch.from_numpy(lines), torch.from_numpy(rows), self._edits)

    def count(self, token_ids: np.ndarray, rows: np.ndarray) -> None:
        """Count a sampled token for each of ``rows``, all of which have edits."""
        used_up = rows[self._counted[rows] & (self._sure_room[rows] == 0)]
        for row in used_up.tolist():
            self._make_room(row)
        self._sure_room[rows] -= 1
        count_tokens(torch.from_numpy(token_ids), torch.from_numpy(rows), self._edits)

    def _make_room(self, row: int) -> None:
        """Recompute a row's room, because repeated tokens need none; if it is small, move the row to a larger place."""
        begin, end, room = (int(self._bounds[row, place]) for place in (0, 5, 6))
        if room - end < _ROOM // 2:
            size = end - begin
            # Larger by half, so that a long answer rarely moves.
            wanted = size + max(_ROOM, size // 2)
            target = self._take(wanted)
            begin = int(self._bounds[row, 0])  # the allocation may have moved it
            self._move(self._ids, self._values, row, target, size)
            self._bounds[row] += target - begin
            self._bounds[row, 6] = target + wanted
        self._sure_room[row] = self._bounds[row, 6] - self._bounds[row, 5]

    def _take(self, size: int) -> int:
        """Return the start of ``size`` places after all others."""
        if self._end + size > len(self._ids):
            self._pack(size)
        begin, self._end = self._end, self._end + size
        return begin

    def _pack(self, wanted: int) -> None:
        """Create a pool with all rows adjacent, twice as large as they are, with ``wanted`` more places."""
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
        """Copy a row's places from an old pool, or this one, to ``target``; the caller updates its bounds."""
        begin = int(self._bounds[row, 0])
        self._ids[target : target + size] = ids[begin : begin + size]
        self._values[target : target + size] = values[begin : begin + size]

    def _as_tensors(self) -> LogitEdits:
        """Return the pool as tensors over the same memory."""
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
    """The edits of a row.

    ``ids`` are allowed, words, stops, biases and counted; ``values`` belongs to all of them in order.
    """

    ids: tuple[np.ndarray, ...]
    values: np.ndarray
    penalised: bool


def row_edits(admission: Admission, vocab_size: int) -> RowEdits | None:
    """Return the edits of a request, or None if it has none. Ids beyond the vocabulary are ignored."""
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
    """Return the ids that occurred, and how often each was sampled."""
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
