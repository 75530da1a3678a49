"""The tokens that a draft model has stored of each row: what it finds in blocks, and what it computes of the rest."""

from dataclasses import replace

import numpy as np
import pytest

from quire_engine.core.batch import Admission, Batch, BlockCopies
from quire_engine.core.kv_layout import KVCacheGroup, KVCacheLayout
from quire_engine.core.sampling_params import SamplingParams
from quire_engine.runner.drafted_rows import DraftedRows

SIZE = 4
LAYOUT = KVCacheLayout(
    block_size=SIZE, groups=(KVCacheGroup(layers=(0,), num_blocks=12, window=None, num_swap_blocks=3),)
)
TABLE = np.array([[0, 1, 2, 3, 4, 5], [6, 7, 8, 9, 10, 11]], dtype=np.int32)
EMPTY = Batch(
    step=1,
    rows=[],
    num_computed=[],
    num_scheduled=[],
    token_ids=[],
    samples=[],
    feedback_tokens=[],
    admitted=[],
    block_updates=(),
    released_rows=[],
)


def step(row: int, computed: int, tokens: list[int], *, drafts: int = 0) -> Batch:
    return replace(
        EMPTY,
        rows=[row],
        num_computed=[computed],
        num_scheduled=[len(tokens)],
        token_ids=tokens,
        samples=[True],
        num_drafts=[drafts] if drafts else [],
    )


def admitted(batch: Batch, prompt: list[int]) -> Batch:
    admission = Admission(
        row=batch.rows[0],
        prompt_token_ids=prompt,
        output_token_ids=[],
        params=SamplingParams(max_tokens=9),
        seed=0,
        eos_token_ids=(),
    )
    return replace(batch, admitted=[admission])


def begun(rows: DraftedRows, batch: Batch, table: np.ndarray = TABLE) -> DraftedRows:
    rows.begin(batch, table)
    return rows


def starts(rows: DraftedRows, row: int, end: int, lowest: int = 0, table: np.ndarray = TABLE) -> int:
    return int(rows.starts(table, np.array([row]), np.array([end]), np.array([lowest]))[0])


def store(rows: DraftedRows, row: int, start: int, end: int, table: np.ndarray = TABLE) -> None:
    rows.store(table, np.array([row]), np.array([start]), np.array([end]))


@pytest.fixture
def rows() -> DraftedRows:
    """Return the state with one row, whose prompt of ten tokens is stored."""
    made = DraftedRows(LAYOUT, max_rows=2, max_model_len=24)
    begun(made, admitted(step(0, 0, list(range(10))), list(range(10))))
    assert starts(made, 0, 10) == 0
    store(made, 0, 0, 10)
    return made


def test_only_missed_tokens_are_computed(rows: DraftedRows) -> None:
    begun(begun(begun(rows, step(0, 10, [7])), step(0, 11, [8])), step(0, 12, [9]))
    assert starts(rows, 0, 13) == 10
    assert rows.tokens(np.array([0]), np.array([10]), np.array([13])).tolist() == [7, 8, 9]


def test_cached_prefix_counts_up_to_the_stored_draft_entries(rows: DraftedRows) -> None:
    shared = TABLE.copy()
    shared[1, :2] = TABLE[0, :2]
    begun(rows, admitted(step(1, 8, [50, 51]), [*range(8), 50, 51]), shared)
    assert starts(rows, 1, 10, table=shared) == 8


def test_a_prefix_that_was_not_stored_is_computed(rows: DraftedRows) -> None:
    begun(rows, admitted(step(1, 0, list(range(8))), list(range(8))))
    shared = TABLE.copy()
    shared[0, :2] = TABLE[1, :2]
    begun(rows, admitted(step(0, 8, [50]), [*range(8), 50]), shared)
    assert starts(rows, 0, 9, table=shared) == 0


def test_block_reused_by_another_sequence_counts_as_empty(rows: DraftedRows) -> None:
    reused = TABLE.copy()
    reused[1, :3] = TABLE[0, :3]
    begun(rows, admitted(step(1, 0, list(range(20, 32))), list(range(20, 32))), reused)
    assert starts(rows, 1, 12, table=reused) == 0


def test_rejected_drafts_are_not_stored(rows: DraftedRows) -> None:
    begun(rows, step(0, 10, [7, 0, 0, 0], drafts=3))
    store(rows, 0, 10, 13)
    begun(rows, step(0, 12, [9]))
    assert starts(rows, 0, 13) == 12
    begun(rows, admitted(step(0, 12, [9]), list(range(13))))
    assert starts(rows, 0, 13) == 12, "the block also forgets the rejected one"


@pytest.mark.parametrize(
    ("end", "lowest", "start", "first"),
    [
        (21, 10, 10, 0),  # nothing that is missed is left out
        (21, 13, 16, 4),  # the first whole block begins at 16
        (16, 14, 14, 3),  # no whole block: the earlier slots of the last one are attended to
    ],
)
def test_rows_with_many_missing_tokens_start_at_a_block_boundary(
    rows: DraftedRows, end: int, lowest: int, start: int, first: int
) -> None:
    begun(rows, step(0, 10, list(range(end - 10))))
    assert starts(rows, 0, end, lowest) == start
    found = rows.columns(TABLE, np.array([0]), np.array([start]), np.array([end]), np.arange(end - start))
    assert found.positions.tolist() == list(range(start, end))
    assert found.slots[0].tolist() == [int(TABLE[0, at // SIZE]) * SIZE + at % SIZE for at in range(start, end)]
    assert rows.firsts[0] == first


def test_swapped_blocks_keep_stored_draft_entries(rows: DraftedRows) -> None:
    out = replace(EMPTY, swap_out=(BlockCopies(sources=[0, 1], targets=[2, 0]),))
    begun(rows, replace(admitted(step(1, 0, [1]), [1]), swap_out=out.swap_out))
    moved = TABLE.copy()
    moved[1, :2] = [9, 4]
    back = (BlockCopies(sources=[2, 0], targets=[9, 4]),)
    begun(rows, replace(admitted(step(1, 8, [3]), list(range(9))), swap_in=back), moved)
    assert starts(rows, 1, 9, table=moved) == 8
