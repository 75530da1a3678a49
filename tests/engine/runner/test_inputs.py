"""The tensors of a step, built from a batch."""

from dataclasses import replace

import numpy as np
import torch
from quire_parity.batches import batch

from quire_engine.core.batch import Batch, BlockUpdates, PromptPositions
from quire_engine.core.kv_layout import KVCacheGroup, KVCacheLayout
from quire_engine.model.layers import ModelInputs
from quire_engine.runner.accelerator import CpuAccelerator
from quire_engine.runner.captured import GraphSizes
from quire_engine.runner.cpu_passes import CpuPasses
from quire_engine.runner.inputs import Rows, step_columns
from quire_engine.runner.logprobs import logits_rows
from quire_engine.runner.passes import PassSizes
from quire_engine.runner.staging import HostToDeviceBatch
from quire_engine.runner.verification import draws_of

LAYOUT = KVCacheLayout(block_size=16, groups=(KVCacheGroup(layers=(0,), num_blocks=50),))


def state(layout: KVCacheLayout = LAYOUT) -> Rows:
    return Rows(layout, max_rows=4, max_blocks=8, device=torch.device("cpu"))


def built(step: Batch, here: Rows, layout: KVCacheLayout = LAYOUT) -> ModelInputs:
    accelerator, sizes = CpuAccelerator(), PassSizes(rows=4, tokens=64, logits=64, draws=4)
    passes = CpuPasses(
        lambda inputs, caches: torch.empty(0),
        (),
        layout,
        here,
        accelerator=accelerator,
        sizes=sizes,
        graph_sizes=GraphSizes(),
    )
    transfer = HostToDeviceBatch(accelerator)
    here.stage(step, transfer)
    columns = step_columns(step, here.tables, layout.block_size)
    return passes.stage(columns, logits_rows(step, columns.ends), draws_of(step, columns), transfer).inputs


def mixed_batch() -> Batch:
    """Return a batch: row 3 decodes token 33, row 1 computes tokens 14 to 17 of a prompt, row 0 a whole prompt of 2."""
    return batch(
        rows=[3, 1, 0],
        num_computed=[33, 14, 0],
        num_scheduled=[1, 4, 2],
        token_ids=[9, 1, 2, 3, 4, 7, 8],
        samples=[True, False, True],
        block_updates=(
            BlockUpdates(rows=[3, 3, 3, 1, 1, 0], positions=[0, 1, 2, 0, 1, 0], blocks=[5, 6, 7, 10, 11, 2]),
        ),
    )


def test_each_token_gets_its_position_and_slot() -> None:
    here, step = state(), mixed_batch()
    inputs = built(step, here)
    assert inputs.token_ids.tolist() == [9, 1, 2, 3, 4, 7, 8]
    assert inputs.positions.tolist() == [33, 14, 15, 16, 17, 0, 1]
    assert inputs.groups[0].slots.tolist() == [7 * 16 + 1, 10 * 16 + 14, 10 * 16 + 15, 11 * 16, 11 * 16 + 1, 32, 33]
    assert inputs.groups[0].plan.num_tokens == 7


def test_logits_are_computed_for_sampled_rows_only() -> None:
    here, step = state(), mixed_batch()
    assert built(step, here).logits_rows.tolist() == [0, 6]


def test_block_tables_are_kept_from_step_to_step() -> None:
    here = state()
    built(mixed_batch(), here)
    step = batch(
        rows=[1],
        num_computed=[18],
        num_scheduled=[15],
        token_ids=[0] * 15,
        samples=[True],
        block_updates=(BlockUpdates(rows=[1], positions=[2], blocks=[40]),),
    )
    assert built(step, here).groups[0].slots.tolist()[-2:] == [11 * 16 + 15, 40 * 16]


def test_pending_token_is_read_from_the_last_sample_of_its_row() -> None:
    here, step = state(), mixed_batch()
    here.last_tokens[[0, 1, 3]] = torch.tensor([100, 101, 103])
    late = batch(**{**{name: getattr(step, name) for name in Batch.__dataclass_fields__}, "feedback_tokens": [0, 6]})
    assert built(late, here).token_ids.tolist() == [103, 1, 2, 3, 4, 7, 100]


def test_every_group_has_its_own_tables() -> None:
    layout = KVCacheLayout(
        block_size=16,
        groups=(KVCacheGroup(layers=(0,), num_blocks=50), KVCacheGroup(layers=(1,), num_blocks=9, window=8)),
    )
    here = state(layout)
    step = batch(
        rows=[2],
        num_computed=[0],
        num_scheduled=[1],
        token_ids=[5],
        samples=[True],
        block_updates=tuple(BlockUpdates(rows=[2], positions=[0], blocks=[block]) for block in (30, 4)),
    )
    assert [group.slots.tolist() for group in built(step, here, layout).groups] == [[480], [64]]


def test_inputs_have_the_dtypes_of_the_kernels() -> None:
    here, step = state(), mixed_batch()
    inputs = built(step, here)
    for tensor in (inputs.token_ids, inputs.positions, inputs.groups[0].slots, inputs.logits_rows):
        assert tensor.dtype == torch.int64 and tensor.is_contiguous()


def test_prompt_positions_have_logits_like_sampled_ones() -> None:
    asked = [
        PromptPositions(index=2, first=0, next_token_ids=[8], num_logprobs=0),
        PromptPositions(index=1, first=15, next_token_ids=[3, 4], num_logprobs=0),
    ]
    wanted = logits_rows(replace(mixed_batch(), prompt_logprobs=asked), np.array([1, 5, 7]))
    assert wanted.rows.tolist() == [0, 2, 3, 5, 6]
    assert wanted.rows[wanted.sampled].tolist() == [0, 6]
    assert wanted.rows[wanted.reported].tolist() == [5, 2, 3]
