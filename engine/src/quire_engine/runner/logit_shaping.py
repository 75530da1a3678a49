"""The changes of logits that requests specify, kept by row from admission to release, on any device.

Allowed ids, forbidden words, minimum length, biases and penalties become a row's *edits*: five adjacent lists of token
ids in one pool (see ``quire_kernels.logit_shaping``). A step names the rows to shape and the sampled tokens; one kernel
launch each does the rest, so no row is visited here. Only the list of tokens that occurred grows.

The pool is in device memory that the host never reads. The host decides where a row's edits are, so it knows
everything about the pool except how many ids a penalized row counts: it assumes a new id with every sampled token. A
row whose room may be used up moves to a larger place, which happens once in many steps. All changes of a step are
staged in one host-to-device batch and then applied, in a few launches for all rows.

Rows without edits cost nothing.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain

import numpy as np
import torch
from torch import Tensor

from quire_engine.core.batch import Admission
from quire_engine.core.sampling_params import SamplingParams
from quire_engine.runner.staging import HostToDeviceBatch, Item
from quire_kernels.logit_shaping import NUM_BOUNDS, TAIL, LogitEdits, count_tokens, shape_logits

_ROOM = 64
"""The places for tokens that have not occurred yet: the number of steps until a row has to move."""
_NEVER_FULL = 1 << 40


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


@dataclass(frozen=True, slots=True, kw_only=True)
class _NewRows:
    """The data of rows that were admitted with edits."""

    rows: Item  # [A] int64
    bounds: Item  # [A, NUM_BOUNDS] int64
    penalties: Item  # [A, 3] float32
    min_tokens: Item  # [A] int64
    num_drawn: Item  # [A] int64
    tails: Item  # [A, TAIL] int32
    places: Item  # [P] int64, in the pool
    ids: Item  # [P] int32
    values: Item  # [P] float32


@dataclass(frozen=True, slots=True, kw_only=True)
class _Moves:
    """Rows whose edits move, in the same pool or to a new one."""

    capacity: int | None
    """The capacity of the new pool, if there is one."""
    sources: Item  # [P] int64, places
    targets: Item  # [P] int64
    rows: Item  # [A] int64
    shifts: Item  # [A, NUM_BOUNDS] int64, what is added to the rows' bounds


class LogitShaping:
    """The edits of all rows. ``stage`` admissions and sampled rows, transfer, ``apply``; then shape and count."""

    def __init__(self, *, max_rows: int, vocab_size: int, device: torch.device) -> None:
        self._vocab_size = vocab_size
        # What the host knows about each row. A row's places are ``begin`` to ``begin + size``; at least the last
        # ``free`` of them are empty; ``fixed`` are not counts.
        self._shaped = np.zeros(max_rows, dtype=np.bool_)
        self._counted = np.zeros(max_rows, dtype=np.bool_)
        self._begin = np.zeros(max_rows, dtype=np.int64)
        self._size = np.zeros(max_rows, dtype=np.int64)
        self._free = np.zeros(max_rows, dtype=np.int64)
        self._fixed = np.zeros(max_rows, dtype=np.int64)
        self._capacity = 0
        self._end = 0
        self._edits = LogitEdits(
            ids=torch.zeros(0, dtype=torch.int32, device=device),
            values=torch.zeros(0, dtype=torch.float32, device=device),
            bounds=torch.zeros((max_rows, NUM_BOUNDS), dtype=torch.int64, device=device),
            penalties=torch.ones((max_rows, 3), dtype=torch.float32, device=device),
            min_tokens=torch.zeros(max_rows, dtype=torch.int64, device=device),
            num_drawn=torch.zeros(max_rows, dtype=torch.int64, device=device),
            tails=torch.zeros((max_rows, TAIL), dtype=torch.int32, device=device),
        )
        self._staged: list[_Moves | _NewRows] = []

    def release(self, row: int) -> None:
        self._shaped[row] = self._counted[row] = False

    def shaped(self, rows: np.ndarray) -> np.ndarray:
        """Return [S] the places in ``rows`` of those with edits."""
        found: np.ndarray = self._shaped[rows].nonzero()[0]
        return found

    def stage(self, admitted: Sequence[Admission], drawn_rows: np.ndarray, transfer: HostToDeviceBatch) -> None:
        """Stage admissions, and room for the tokens that this step samples for ``drawn_rows`` [K]."""
        for admission in admitted:
            self.release(admission.row)
        new = [(admission, edits) for admission in admitted if (edits := row_edits(admission, self._vocab_size))]
        full = drawn_rows[self._counted[drawn_rows] & (self._free[drawn_rows] == 0)]
        wanted = np.array([self._wanted(row) for row in full.tolist()], dtype=np.int64)
        self._reserve(sum(map(_room_for, (edits for _, edits in new))) + int(wanted.sum()), transfer)
        if len(full):
            self._enlarge(full, wanted, transfer)
        if new:
            self._stage_new(new, transfer)
        self._free[drawn_rows[self._counted[drawn_rows]]] -= 1

    def _wanted(self, row: int) -> int:
        """Return a size that is half as large again, so that long answers rarely move; at most each id is counted."""
        size = int(self._size[row])
        return min(size + max(_ROOM, size // 2), int(self._fixed[row]) + self._vocab_size)

    def _free_places(self, row: int, *, used: int) -> int:
        """Return the number of a counted row's places that are certainly empty."""
        whole = self._size[row] - self._fixed[row] >= self._vocab_size
        return _NEVER_FULL if whole else int(self._size[row]) - used

    def _reserve(self, wanted: int, transfer: HostToDeviceBatch) -> None:
        """Reserve room after all rows, if necessary in a new pool of twice the size that the rows take."""
        if self._end + wanted <= self._capacity:
            return
        rows = np.flatnonzero(self._shaped & (self._size > 0))
        sizes = self._size[rows]
        ends = np.cumsum(sizes)
        self._end = int(sizes.sum())
        self._capacity = max(1024, 2 * (self._end + wanted))
        shifts = np.repeat((ends - sizes - self._begin[rows])[:, None], NUM_BOUNDS, axis=1)
        self._stage_moves(rows, ends - sizes, sizes, shifts, transfer, capacity=self._capacity)

    def _enlarge(self, rows: np.ndarray, wanted: np.ndarray, transfer: HostToDeviceBatch) -> None:
        targets = self._end + np.cumsum(wanted) - wanted
        self._end += int(wanted.sum())
        sizes = self._size[rows]
        shifts = np.repeat((targets - self._begin[rows])[:, None], NUM_BOUNDS, axis=1)
        shifts[:, -1] += wanted - sizes
        self._stage_moves(rows, targets, sizes, shifts, transfer, capacity=None)
        self._size[rows] = wanted
        self._free[rows] = [
            self._free_places(row, used=used) for row, used in zip(rows.tolist(), sizes.tolist(), strict=True)
        ]

    def _stage_moves(
        self,
        rows: np.ndarray,
        targets: np.ndarray,
        sizes: np.ndarray,
        shifts: np.ndarray,
        transfer: HostToDeviceBatch,
        *,
        capacity: int | None,
    ) -> None:
        self._staged.append(
            _Moves(
                capacity=capacity,
                sources=transfer.add(_ranges(self._begin[rows], sizes)),
                targets=transfer.add(_ranges(targets, sizes)),
                rows=transfer.add(rows),
                shifts=transfer.add(shifts),
            )
        )
        self._begin[rows] = targets

    def _stage_new(self, new: list[tuple[Admission, RowEdits]], transfer: HostToDeviceBatch) -> None:
        count = len(new)
        bounds = np.zeros((count, NUM_BOUNDS), dtype=np.int64)
        penalties = np.zeros((count, 3), dtype=np.float32)
        tails = np.zeros((count, TAIL), dtype=np.int32)
        for i, (admission, edits) in enumerate(new):
            row, drawn, params = admission.row, admission.output_token_ids, admission.params
            lengths = [len(part) for part in edits.ids]
            size = _room_for(edits)
            begin, self._end = self._end, self._end + size
            bounds[i] = [begin, *(begin + np.cumsum(lengths)), begin + size]
            penalties[i] = params.repetition_penalty, params.frequency_penalty, params.presence_penalty
            places = np.arange(max(0, len(drawn) - TAIL), len(drawn))
            tails[i, places % TAIL] = drawn[-TAIL:]
            self._shaped[row], self._counted[row] = True, edits.penalised
            self._begin[row], self._size[row], self._fixed[row] = begin, size, sum(lengths[:-1])
            self._free[row] = self._free_places(row, used=sum(lengths))
        sizes = bounds[:, 5] - bounds[:, 0]
        self._staged.append(
            _NewRows(
                rows=transfer.add(_int64(admission.row for admission, _ in new)),
                bounds=transfer.add(bounds),
                penalties=transfer.add(penalties),
                min_tokens=transfer.add(_int64(admission.params.min_tokens for admission, _ in new)),
                num_drawn=transfer.add(_int64(len(admission.output_token_ids) for admission, _ in new)),
                tails=transfer.add(tails),
                places=transfer.add(_ranges(bounds[:, 0], sizes)),
                ids=transfer.add(np.concatenate([part for _, edits in new for part in edits.ids])),
                values=transfer.add(np.concatenate([edits.values for _, edits in new])),
            )
        )

    def apply(self) -> None:
        """Apply the staged changes in order."""
        for change in self._staged:
            match change:
                case _Moves():
                    self._move(change)
                case _NewRows():
                    self._write(change)
        self._staged = []

    def _move(self, moves: _Moves) -> None:
        edits, sources, targets = self._edits, moves.sources.on_device, moves.targets.on_device
        moved = [pool.index_select(0, sources) for pool in (edits.ids, edits.values)]
        if moves.capacity is not None:
            self._edits = edits = LogitEdits(
                ids=edits.ids.new_zeros(moves.capacity),
                values=edits.values.new_zeros(moves.capacity),
                bounds=edits.bounds,
                penalties=edits.penalties,
                min_tokens=edits.min_tokens,
                num_drawn=edits.num_drawn,
                tails=edits.tails,
            )
        edits.ids.index_copy_(0, targets, moved[0])
        edits.values.index_copy_(0, targets, moved[1])
        edits.bounds.index_add_(0, moves.rows.on_device, moves.shifts.on_device)

    def _write(self, new: _NewRows) -> None:
        edits, rows, places = self._edits, new.rows.on_device, new.places.on_device
        edits.ids.index_copy_(0, places, new.ids.on_device)
        edits.values.index_copy_(0, places, new.values.on_device)
        for state, item in (
            (edits.bounds, new.bounds),
            (edits.penalties, new.penalties),
            (edits.min_tokens, new.min_tokens),
            (edits.num_drawn, new.num_drawn),
            (edits.tails, new.tails),
        ):
            state.index_copy_(0, rows, item.on_device)

    def shape(self, logits: Tensor, lines: Tensor, rows: Tensor) -> None:
        """Change float32 logits [R, V] in place: line ``lines[i]`` by the edits of row ``rows[i]``."""
        shape_logits(logits, lines, rows, self._edits)

    def count(self, token_ids: Tensor, rows: Tensor) -> None:
        """Count a sampled token for each of ``rows``, all of which have edits."""
        count_tokens(token_ids, rows, self._edits)


def _room_for(edits: RowEdits) -> int:
    return sum(map(len, edits.ids)) + (_ROOM if edits.penalised else 0)


def _ranges(begins: np.ndarray, sizes: np.ndarray) -> np.ndarray:
    """Return sizes[0] numbers from begins[0] on, then sizes[1] numbers from begins[1] on, and so on."""
    ends = np.cumsum(sizes)
    return np.arange(int(sizes.sum())) + np.repeat(begins - (ends - sizes), sizes)


def _int64(numbers: object) -> np.ndarray:
    return np.fromiter(numbers, dtype=np.int64)  # type: ignore[call-overload]
