"""The parts of the sampler that only Triton has: parts of a row, launches by batch size, candidates, 16 bits."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from sampling_settings import Settings, columns, expected

from quire_kernels.sampling import device_kernels, greedy, kernel, sample

KINDS: list[Settings] = [
    {},
    {"temperature": 0.0},
    {"top_k": 7},
    {"top_p": 0.5},
    {"min_p": 0.2},
    {"typical_p": 0.5},
    {"temperature": 2.0, "top_k": 30, "top_p": 0.8, "min_p": 0.01},
]


pytestmark = pytest.mark.usefixtures("poisoned")


def test_any_split_of_a_row_gives_the_same_sample(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    kinds: list[Settings] = [{}, {"top_p": 0.9, "temperature": 0.5}, {"top_k": 40, "typical_p": 0.9}]
    logits = 2.0 * torch.randn(3, 5000, device=device)
    settings = columns(kinds, 5000, device)
    drawn = []
    for parts in (1, 2, 8):
        monkeypatch.setattr(device_kernels, "number_of_parts", lambda *_, parts=parts: parts)
        drawn.append(sample(logits, **settings).tolist())
    assert drawn == [expected(logits, settings)] * 3


class Launches:
    """A wrapper of a kernel that records the constants of each launch."""

    def __init__(self, launched: Any) -> None:
        self._launched = launched
        self.arg_names, self.params = launched.arg_names, getattr(launched, "params", ())
        self.constants: list[dict[str, Any]] = []

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        def launch(*operands: object, **constants: Any) -> None:
            self.constants.append(constants)
            self._launched[grid](*operands, **constants)

        return launch


@pytest.fixture
def new_launches() -> Iterator[None]:
    """Let the test make the launches of its kernels, and forget them afterwards."""
    made: tuple[Any, ...] = (device_kernels._weigh, kernel._draw_launch, kernel._first)
    for launch in made:
        launch.cache_clear()
    yield
    for launch in made:
        launch.cache_clear()


@pytest.mark.usefixtures("new_launches")
def test_growing_batch_compiles_nothing(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows are split into fewer parts the more there are; a constant for that would cause compilations."""
    launches = []
    for module, name in ((device_kernels, "_weigh_kernel"), (kernel, "_draw_kernel"), (kernel, "_first_kernel")):
        launches.append(Launches(getattr(module, name)))
        monkeypatch.setattr(module, name, launches[-1])
    monkeypatch.setattr(device_kernels, "number_of_parts", lambda rows, *_: 8 // rows)
    monkeypatch.setattr(kernel, "number_of_parts", lambda rows, *_: 8 // rows)
    for rows in (1, 2):
        logits = torch.randn(rows, 500, device=device)
        sample(logits, **columns([{}] * rows, 500, device))
        greedy(logits)
    assert all(len(seen.constants) == 2 and seen.constants[0] == seen.constants[1] for seen in launches)


def test_candidates_beyond_the_list_are_searched_in_the_row(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kernel, "MOST_CANDIDATES", 16)
    kinds: list[Settings] = [{"top_p": 0.9}, {"top_k": 60}, {"min_p": 0.01, "typical_p": 0.9}]
    logits = torch.randn(3, 600, device=device)
    settings = columns(kinds, 600, device)
    assert sample(logits, **settings).tolist() == expected(logits, settings)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_sixteen_bit_logits_are_read_without_conversion(device: torch.device, dtype: torch.dtype) -> None:
    vocabulary = 300
    logits = torch.randn(len(KINDS), vocabulary, generator=torch.Generator().manual_seed(5)).mul(3).to(dtype).to(device)
    logits[2, 7], logits[3, ::3] = torch.nan, -torch.inf
    settings = columns(KINDS, vocabulary, device)
    assert torch.equal(sample(logits, **settings), sample(logits.float(), **settings))
    assert torch.equal(greedy(logits), greedy(logits.float()))
