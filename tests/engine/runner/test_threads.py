"""The number of threads of a step."""

from collections.abc import Iterator
from types import SimpleNamespace

import pytest
import torch

from quire_engine.runner.threads import SharedFrom, ThreadChooser, sharing_begins, use_threads
from quire_engine.runner.waiting import Waits


@pytest.fixture(autouse=True)
def restored() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def test_threads_never_exceed_the_cpus(caplog: pytest.LogCaptureFixture) -> None:
    assert use_threads(10_000) == torch.get_num_threads() < 10_000
    assert "instead of 10000" in caplog.text
    assert use_threads(1) == torch.get_num_threads() == 1


@pytest.mark.parametrize(
    ("name", "mean_linear_bytes", "mean_linear_weights", "asleep", "spinning"),
    [
        ("5 million parameters in 16 bits", 440e3, 220e3, 36, 1),
        ("the same in 32 bits", 880e3, 220e3, 36, 1),
        ("135 million parameters in 16 bits: reading its weights alone is worth it", 2.2e6, 1.1e6, 1, 1),
        ("a toy", 1e3, 500.0, 16_000, 1_600),
    ],
)
def test_small_layers_are_shared_from_many_tokens_on(
    name: str, mean_linear_bytes: float, mean_linear_weights: float, asleep: int, spinning: int
) -> None:
    found = sharing_begins(mean_linear_bytes=mean_linear_bytes, mean_linear_weights=mean_linear_weights)
    assert found == SharedFrom(asleep=asleep, spinning=spinning)


@pytest.mark.parametrize(("queued", "used"), [(0.0, [1, 2, 2, 2, 1]), (None, [1, 1, 2, 2, 1])], ids=["spin", "sleep"])
def test_each_step_gets_the_threads_its_size_calls_for(queued: float | None, used: list[int]) -> None:
    switch = SimpleNamespace(spin=lambda: None, sleep=lambda: None)
    waits = Waits(switch, threads=2, queued_seconds=lambda: queued)
    chooser = ThreadChooser(2, shared_from=SharedFrom(asleep=36, spinning=9), waits=waits)
    found = []
    for tokens in (1, 35, 36, 500, 2):
        chooser.prepare(tokens)
        found.append(torch.get_num_threads())
    assert found == used
    chooser.close()
