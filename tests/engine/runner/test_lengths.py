"""The lengths of rows on the device: rejected drafts, and the inputs of the next step without them."""

from dataclasses import replace

import numpy as np
import pytest
import torch

pytest.importorskip("triton", reason="torch's CPU build comes without triton")

from quire_engine.core.batch import Batch, BlockUpdates
from quire_engine.core.kv_layout import KVCacheGroup, KVCacheLayout
from quire_engine.runner.device.accelerator import make_accelerator
from quire_engine.runner.device.inputs import DeviceRows, sizes_of, write_inputs
from quire_engine.runner.device.lengths import DeviceLengths
from quire_engine.runner.device.staging import HostToDeviceBatch, StepStaging
from quire_engine.runner.inputs import step_columns
from quire_engine.runner.logprobs import logits_rows
from quire_engine.runner.verification import draws_of, verified

DEVICE = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
SIZE, ROWS, BLOCKS = 4, 3, 12
LAYOUT = KVCacheLayout(block_size=SIZE, groups=(KVCacheGroup(layers=(0,), num_blocks=BLOCKS),))
# Row 2 has two drafts, row 0 has none, and row 1 computes the rest of a prompt and samples after it.
DRAFTED = Batch(
    step=1,
    rows=[2, 0, 1],
    num_computed=[6, 3, 0],
    num_scheduled=[3, 1, 2],
    token_ids=[10, 11, 12, 20, 30, 31],
    samples=[True, True, True],
    feedback_tokens=[],
    admitted=[],
    block_updates=(BlockUpdates(rows=[2, 2, 2, 0, 0, 1], positions=[0, 1, 2, 0, 1, 0], blocks=[7, 3, 5, 1, 2, 9]),),
    released_rows=[],
    num_drafts=[2, 0, 0],
)


class Device:
    """The rows of a device, and the lengths of them."""

    def __init__(self) -> None:
        self.accelerator = make_accelerator(DEVICE)
        self.rows = DeviceRows(layout=LAYOUT, max_rows=ROWS, max_blocks=4, max_tokens=16, device=DEVICE)
        self.lengths = DeviceLengths(self.rows, max_rows=ROWS, max_drafts=3, block_size=SIZE, device=DEVICE)

    def verify(self, batch: Batch, sampled: list[int]) -> None:
        transfer = HostToDeviceBatch(self.accelerator)
        self.rows.stage(batch, transfer)
        columns = step_columns(batch, self.rows.host.tables, SIZE)
        plan = self.lengths.stage(batch, columns, transfer)
        transfer.send()
        self.rows.apply()
        self.lengths.verify(plan, *(torch.tensor(tokens, device=DEVICE) for tokens in (sampled, batch.token_ids)))

    def inputs_of(self, batch: Batch) -> dict[str, list[int]]:
        """Return the inputs of a step that follows."""
        transfer = HostToDeviceBatch(self.accelerator)
        self.rows.stage(batch, transfer)
        columns = step_columns(batch, self.rows.host.tables, SIZE)
        plan = self.lengths.stage(batch, columns, transfer)
        wanted, draws = logits_rows(batch), draws_of(batch)
        sizes = sizes_of(columns, logits=len(wanted.rows), draws=len(draws.rows))
        staging = StepStaging(self.accelerator, groups=1, largest=sizes)
        write_inputs(staging.begin(sizes), columns, wanted.rows, wanted.sampled, draws, self.rows)
        staging.upload(sizes)
        transfer.send()
        self.rows.apply()
        inputs = staging.on_device(sizes)
        if plan.moved is not None:
            self.lengths.begin(plan.moved)
            self.lengths.move_back(inputs, sizes, self.rows.tables)
        names = ("positions", "contexts", "drawn_positions")
        return {**{name: getattr(inputs, name).tolist() for name in names}, "slots": inputs.slots[0].tolist()}


@pytest.mark.parametrize(
    ("sampled", "rejected", "last"),
    [
        ([11, 12, 40, 50, 60], 0, (12, 40)),
        ([11, 13, 40, 50, 60], 1, (11, 13)),
        ([13, 12, 40, 50, 60], 2, (10, 13)),  # the second draft counts for nothing without the first
    ],
)
def test_rejected_drafts_and_the_end_of_each_text_are_remembered(
    sampled: list[int], rejected: int, last: tuple[int, int]
) -> None:
    device = Device()
    device.verify(DRAFTED, sampled)
    assert device.lengths._rejected.tolist() == [0, 0, rejected, 0]
    assert device.lengths.last_tokens.tolist() == [50, 60, last[1], 0]
    assert device.lengths.previous_tokens.tolist() == [20, 31, last[0], 0]
    host = verified(DRAFTED, np.array(sampled), np.array(DRAFTED.token_ids))
    assert host.counts.tolist() == [3 - rejected, 1, 1]


@pytest.mark.parametrize("rejected", [0, 1, 2])
def test_a_step_that_follows_drafts_has_the_inputs_of_one_that_waits(rejected: int) -> None:
    """Row 2 is fed back with another draft, row 0 as well, and row 1 was committed: its text is known."""
    sampled = [[11, 12], [11, 13], [13, 12]][rejected]
    following = Batch(
        step=2,
        rows=[2, 0, 1],
        num_computed=[9, 4, 2],
        num_scheduled=[2, 1, 1],
        token_ids=[0, 40, 0, 60],
        samples=[True, True, True],
        feedback_tokens=[0, 2],
        admitted=[],
        block_updates=(BlockUpdates(),),
        released_rows=[],
        num_drafts=[1, 0, 0],
    )
    found = []
    for ahead in (True, False):
        device = Device()
        device.verify(DRAFTED, [*sampled, 40, 50, 60])
        waited = replace(following, num_computed=[9 - rejected, 4, 2], feedback_tokens=[])
        found.append(device.inputs_of(following if ahead else waited))
    assert found[0] == found[1]
    assert found[0]["positions"] == [9 - rejected, 10 - rejected, 4, 2]
