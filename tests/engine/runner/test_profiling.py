"""The trial step and graph before a GPU's memory is divided, with fakes for both."""

from collections.abc import Callable
from dataclasses import dataclass, field

import pytest

from quire_engine.core.batch import Batch, RunnerOutput
from quire_engine.core.kv_layout import KVCacheGroup, KVCacheLayout
from quire_engine.core.speculation.proposers import why_not
from quire_engine.runner.profiling import Profile, largest_step, profile

LAYOUT = KVCacheLayout(
    block_size=16,
    groups=(KVCacheGroup(layers=(0,), num_blocks=4), KVCacheGroup(layers=(1,), num_blocks=4, window=32)),
)


def step(sequences: int, tokens: int, max_model_len: int = 4096, logprobs: int = 20) -> Batch:
    return largest_step(
        LAYOUT,
        sequences=sequences,
        tokens=tokens,
        max_model_len=max_model_len,
        vocab_size=1000,
        logprobs=logprobs,
    )


@pytest.mark.parametrize(("sequences", "tokens"), [(1, 1), (1, 100), (7, 100), (256, 2048), (64, 64), (3, 50)])
def test_the_step_has_all_sequences_and_all_tokens(sequences: int, tokens: int) -> None:
    batch = step(sequences, tokens)
    assert len(batch.rows) == len(batch.admitted) == sequences and all(batch.samples)
    assert sum(batch.num_scheduled) == batch.num_tokens == tokens and min(batch.num_scheduled) >= 1


@pytest.mark.parametrize(
    ("sequences", "tokens", "reported"),
    [(1, 1, 0), (1, 100, 99), (7, 100, 93), (1, 2048, 256), (256, 2048, 36 * 7 + 4 + 219), (64, 64, 0)],
)
def test_the_step_reports_as_many_positions_as_one_may(sequences: int, tokens: int, reported: int) -> None:
    assert sum(len(asked.next_token_ids) for asked in step(sequences, tokens).prompt_logprobs) == reported


@pytest.mark.parametrize(
    ("sequences", "tokens", "drafts", "expected"),
    [(1, 100, 8, [8]), (3, 50, 8, [3, 3, 2]), (4, 4, 8, [0, 0, 0, 0]), (2, 6, 50, [2, 2])],
)
def test_the_step_has_as_many_drafts_as_one_may(sequences: int, tokens: int, drafts: int, expected: list[int]) -> None:
    """Drafts follow a known token each, and no sampling parameter of their sequences depends on earlier samples."""
    batch = largest_step(
        LAYOUT, sequences=sequences, tokens=tokens, max_model_len=4096, vocab_size=1000, logprobs=20, drafts=drafts
    )
    assert batch.num_drafts == expected and batch.num_tokens == tokens
    assert all(why_not(admission.params) is None for admission in batch.admitted)
    for asked in batch.prompt_logprobs:
        known = batch.num_scheduled[asked.index] - expected[asked.index]
        assert asked.first == batch.num_computed[asked.index] and len(asked.next_token_ids) < known


def test_the_step_is_no_longer_than_sequences_may_be() -> None:
    assert step(2, 100, max_model_len=30).num_scheduled == [30, 30]


def test_every_token_has_a_slot_in_the_few_blocks() -> None:
    batch = step(5, 203)
    for updates in batch.block_updates:
        tables: dict[int, dict[int, int]] = {}
        for row, position, block in zip(updates.rows, updates.positions, updates.blocks, strict=True):
            tables.setdefault(row, {})[position] = block
        assert all(set(tables[row]) == set(range(-(-batch.num_scheduled[row] // 16))) for row in batch.rows)
        assert {block for table in tables.values() for block in table.values()} <= set(range(4))


def test_profiled_logprobs_are_limited_to_the_vocabulary() -> None:
    assert {asked.num_logprobs for asked in step(2, 9, logprobs=5000).prompt_logprobs} == {1000}


@dataclass
class FakeDevice:
    """A device with free bytes; what a runner allocates stays with the allocator until it is settled."""

    free_bytes: int = 1000
    kept: int = 0
    log: list[str] = field(default_factory=list)

    def free(self) -> int:
        return self.free_bytes

    def settle(self) -> None:
        self.free_bytes += self.kept
        self.kept = 0
        self.log.append("settle")

    def take(self, size: int) -> None:
        self.free_bytes -= size


@dataclass
class FakePending:
    device: FakeDevice

    def sample(self, masks: object = None) -> "FakePending":
        return self

    def wait(self) -> RunnerOutput:
        self.device.log.append("wait")
        return RunnerOutput(token_ids=[0])


@dataclass
class FakeRunner:
    device: FakeDevice
    fails: bool = False

    def execute(self, batch: Batch) -> FakePending:
        if self.fails:
            raise MemoryError
        self.device.take(300)
        self.device.kept += 120
        return FakePending(self.device)

    def capture_graphs(self, captured: Callable[[], None]) -> None:
        for size in (50, 7):
            self.device.settle()  # as torch does before it captures
            self.device.take(size)
            self.device.log.append("capture")
            captured()

    def close(self) -> None:
        self.device.log.append("close")


def made(device: FakeDevice, *, fails: bool = False) -> FakeRunner:
    device.take(100)
    return FakeRunner(device, fails)


@pytest.mark.parametrize(("captures", "graphs"), [(True, (50, 7)), (False, ())])
def test_memory_of_the_step_and_of_each_graph_is_separate(captures: bool, graphs: tuple[int, ...]) -> None:
    device = FakeDevice(kept=200)
    found = profile(lambda: made(device), [step(2, 9)], device, captures=captures)
    # The rest of the loading is freed before; what the runner keeps for its steps counts with the step.
    assert found == Profile(free=800, activations=400, graphs=graphs)
    # What the step leaves for reuse is freed before a graph is measured, otherwise it would reduce the graph's size.
    capture = ["settle", *["settle", "capture", "settle"] * 2] if captures else []
    assert device.log == ["settle", "wait", *capture, "close"]


def test_a_runner_that_fails_is_closed() -> None:
    device = FakeDevice()
    with pytest.raises(MemoryError):
        profile(lambda: made(device, fails=True), [step(2, 9)], device, captures=True)
    assert device.log == ["settle", "close"]
