"""The runner that checks the scheduler detects errors: each of its rules is broken once."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from quire_engine.core.batch import Admission, Batch, BlockCopies, BlockUpdates
from quire_engine.core.fake_runner import FakeRunner
from quire_engine.core.kv_layout import KVCacheGroup, KVCacheLayout
from quire_engine.core.sampling_params import SamplingParams

LAYOUT = KVCacheLayout(block_size=2, groups=(KVCacheGroup(layers=(0,), num_blocks=8),))


def admission(row: int) -> Admission:
    return Admission(
        row=row,
        prompt_token_ids=[1],
        output_token_ids=[],
        params=SamplingParams(max_tokens=9),
        seed=0,
        eos_token_ids=(),
    )


def batch(number: int, **changes: Any) -> Batch:
    """Return a batch in which row 0 reads three tokens into blocks 4 and 5 and then continues by one."""
    first = number == 1
    plain = Batch(
        step=number,
        rows=[0],
        num_computed=[0 if first else 3],
        num_scheduled=[3 if first else 1],
        token_ids=[7, 8, 9] if first else [3],
        samples=[True],
        feedback_tokens=[],
        admitted=[admission(0)] if first else [],
        block_updates=(BlockUpdates(rows=[0, 0], positions=[0, 1], blocks=[4, 5]) if first else BlockUpdates(),),
        released_rows=[],
    )
    return replace(plain, **changes)


def second_row(block: int) -> dict[str, Any]:
    """Return another sequence, which writes two tokens into ``block``."""
    return {
        "rows": [1],
        "num_computed": [0],
        "num_scheduled": [2],
        "token_ids": [1, 2],
        "admitted": [admission(1)],
        "block_updates": (BlockUpdates(rows=[1], positions=[0], blocks=[block]),),
    }


@pytest.mark.parametrize(
    ("second", "complaint"),
    [
        pytest.param({"step": 3}, "out of order", id="a step is missing"),
        pytest.param({"num_computed": [2]}, "goes on at 2, not 3", id="a token is computed twice"),
        pytest.param({"num_computed": [4]}, "goes on at 4, not 3", id="a token is left out"),
        pytest.param({"num_scheduled": [2]}, "", id="columns do not add up"),
        pytest.param({"admitted": [admission(0)]}, "row 0 is taken", id="a row is admitted unreleased"),
    ],
)
def test_broken_runner_rule_is_detected(second: dict[str, Any], complaint: str) -> None:
    runner = FakeRunner(layout=LAYOUT, vocab_size=50)
    runner.execute(batch(1)).sample()
    with pytest.raises(AssertionError, match=complaint or None):
        runner.execute(batch(2, **second))


@pytest.mark.parametrize("block", [4, 5])
def test_block_shared_by_mistake_is_detected(block: int) -> None:
    runner = FakeRunner(layout=LAYOUT, vocab_size=50)
    runner.execute(batch(1)).sample()
    runner.execute(batch(2, **second_row(block))).sample()
    with pytest.raises(AssertionError, match="was overwritten|was stored for"):
        runner.execute(batch(3))


def test_sequences_with_separate_blocks_give_isolated_answers() -> None:
    together, alone = (FakeRunner(layout=LAYOUT, vocab_size=50) for _ in range(2))
    together.execute(batch(1)).sample()
    alone.execute(batch(1)).sample()
    together.execute(batch(2, **second_row(6))).sample()
    assert together.execute(batch(3)).sample().wait().token_ids == alone.execute(batch(2)).sample().wait().token_ids


def test_leaked_block_is_detected(make_world: Callable[..., Any]) -> None:
    world = make_world(num_blocks=6, max_num_seqs=2, caching=False)
    world.add(1, [1] * 6, max_tokens=10)
    world.step()
    [sequence] = world.scheduler._running
    world.scheduler._kv.pools[0].release([sequence.block_tables[0][0]])
    with pytest.raises(AssertionError, match="0 references, 1 holders"):
        world.engine.check_integrity()


def swapping(**copies: Any) -> FakeRunner:
    """Return a runner whose row 0 was written to blocks 4 and 5 and copied out; ``copies`` bring something back."""
    layout = KVCacheLayout(block_size=2, groups=(KVCacheGroup(layers=(0,), num_blocks=8, num_swap_blocks=3),))
    runner = FakeRunner(layout=layout, vocab_size=50)
    runner.execute(batch(1)).sample()
    runner.execute(batch(2, **second_row(6), swap_out=(BlockCopies(sources=[4, 5], targets=[0, 2]),))).sample()
    runner.execute(batch(3, **copies)).sample()
    return runner


def test_swapped_in_blocks_have_their_contents() -> None:
    swapping(swap_in=(BlockCopies(sources=[0, 2], targets=[4, 5]),))


@pytest.mark.parametrize(
    ("copies", "complaint"),
    [
        pytest.param(BlockCopies(sources=[2, 0], targets=[4, 5]), "reads what was stored for", id="in a wrong order"),
        pytest.param(BlockCopies(sources=[0, 0], targets=[4, 5]), "reads what was stored for", id="one block twice"),
        pytest.param(BlockCopies(sources=[0, 2], targets=[4, 4]), "onto one another", id="to one place"),
        pytest.param(BlockCopies(sources=[3], targets=[4]), "no such block", id="a block that is not there"),
        pytest.param(BlockCopies(sources=[1], targets=[4]), "", id="a block that was never copied out"),
    ],
)
def test_wrong_copy_is_detected(copies: BlockCopies, complaint: str) -> None:
    with pytest.raises((AssertionError, KeyError), match=complaint or None):
        swapping(swap_in=(copies,))
