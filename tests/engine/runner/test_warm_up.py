"""The runs before the first request, so that no request waits for the compilation of a kernel."""

from dataclasses import dataclass, field

import pytest

from quire_engine.core.batch import Batch, RunnerOutput
from quire_engine.core.kv_layout import KVCacheGroup, KVCacheLayout
from quire_engine.runner.warm_up import SHORT_CHUNKS, warm_up

LAYOUT = KVCacheLayout(block_size=16, groups=(KVCacheGroup(layers=(0,), num_blocks=8),))


@dataclass
class FakeRunner:
    """A runner that records the number of tokens of each step."""

    lengths: list[int] = field(default_factory=list)

    def execute(self, batch: Batch) -> "FakeRunner":
        assert len(batch.token_ids) == sum(batch.num_scheduled)
        self.lengths += batch.num_scheduled
        return self

    def sample(self, masks: object = None) -> "FakeRunner":
        return self

    def wait(self) -> RunnerOutput:
        return RunnerOutput(token_ids=[0], run_seconds=0.01)

    def close(self) -> None:
        pass


def lengths(*, max_model_len: int = 100, max_tokens: int = 100, chunks: tuple[int, ...] = SHORT_CHUNKS) -> list[int]:
    runner = FakeRunner()
    warm_up(runner, LAYOUT, max_model_len=max_model_len, max_tokens=max_tokens, block_bytes=(1024,), chunks=chunks)
    return runner.lengths


def test_every_tile_height_of_short_queries_is_warmed_up() -> None:
    tiles = pytest.importorskip("quire_kernels.paged_attention.tiles")
    plan = pytest.importorskip("quire_kernels.paged_attention.plan")
    ran = [length for length in lengths() if length <= plan.MAX_SHORT_QUERIES]
    for group in (1, 2, 3, 4, 5, 6, 7, 8, 12, 16, 64, 128):
        for head_dim, query_bytes in ((64, 2), (128, 2), (128, 4), (256, 2)):
            shape = (group, head_dim, query_bytes)
            served = {tiles.short_rows(queries, *shape) for queries in range(1, plan.MAX_SHORT_QUERIES + 1)}
            assert {tiles.short_rows(queries, *shape) for queries in ran} == served


@pytest.mark.parametrize(("max_model_len", "max_tokens"), [(1, 1), (3, 100), (100, 5), (1000, 16)])
def test_no_step_is_longer_than_steps_or_sequences_may_be(max_model_len: int, max_tokens: int) -> None:
    assert max(lengths(max_model_len=max_model_len, max_tokens=max_tokens)) <= min(max_model_len, max_tokens)


def test_requested_chunks_are_added_to_the_warm_up() -> None:
    asked, plain = lengths(), lengths(chunks=())
    assert sorted(asked) == sorted([*plain, *SHORT_CHUNKS])
