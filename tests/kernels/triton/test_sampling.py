"""The sampler in Triton samples as the reference does. A launch has rows of all kinds, as a batch does."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from quire_kernels.sampling import device_kernels, greedy, kernel, reference, sample

Settings = dict[str, float]
Strided = Callable[..., Tensor]
KEEP_ALL: Settings = {"temperature": 1.0, "top_p": 1.0, "min_p": 0.0, "typical_p": 1.0, "seeds": 1}
KINDS: list[Settings] = [
    {},
    {"temperature": 0.0},
    {"temperature": 0.3},
    {"top_k": 1},
    {"top_k": 7},
    {"top_p": 0.5},
    {"top_p": 1e-6},
    {"top_p": 0.999},
    {"min_p": 0.2},
    {"min_p": 1.0},
    {"typical_p": 0.5},
    {"typical_p": 1e-6, "temperature": 0.2},
    {"top_k": 6, "typical_p": 0.4, "seeds": -1},
    {"top_p": 0.9, "typical_p": 0.7, "temperature": 1.5, "seeds": -(1 << 63)},
    {"temperature": 2.0, "top_k": 30, "top_p": 0.8, "min_p": 0.01},
    {"top_k": 30, "top_p": 0.1, "temperature": 0.7},
]


def columns(kinds: list[Settings], vocabulary: int, device: torch.device, first_position: int = 0) -> dict[str, Tensor]:
    rows = [{**KEEP_ALL, "top_k": vocabulary, **kind} for kind in kinds]
    whole = ("top_k", "seeds")
    made = {
        name: torch.tensor([row[name] for row in rows], dtype=torch.int64 if name in whole else torch.float32)
        for name in (*KEEP_ALL, "top_k")
    }
    made["positions"] = torch.arange(first_position, first_position + len(kinds))
    return {name: column.to(device) for name, column in made.items()}


def on_cpu(settings: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: column.cpu() for name, column in settings.items()}


pytestmark = pytest.mark.usefixtures("poisoned")


@pytest.mark.parametrize(("vocabulary", "ties"), [(32, True), (1003, False)])
def test_samples_equal_the_reference(vocabulary: int, ties: bool, device: torch.device, strided: Strided) -> None:
    logits = 3.0 * strided(len(KINDS), vocabulary, dtype=torch.float32)
    if ties:
        logits = logits.round()
    settings = columns(KINDS, vocabulary, device)
    assert sample(logits, **settings).tolist() == reference.sample(logits.cpu(), **on_cpu(settings)).tolist()


def test_any_split_of_a_row_gives_the_same_sample(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    kinds: list[Settings] = [{}, {"top_p": 0.9, "temperature": 0.5}, {"top_k": 40, "typical_p": 0.9}]
    logits = 2.0 * torch.randn(3, 5000, device=device)
    settings = columns(kinds, 5000, device)
    drawn = []
    for parts in (1, 2, 8):
        monkeypatch.setattr(device_kernels, "number_of_parts", lambda *_, parts=parts: parts)
        drawn.append(sample(logits, **settings).tolist())
    assert drawn == [reference.sample(logits.cpu(), **on_cpu(settings)).tolist()] * 3


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
    assert sample(logits, **settings).tolist() == reference.sample(logits.cpu(), **on_cpu(settings)).tolist()


def test_a_rows_token_does_not_depend_on_its_batch(device: torch.device) -> None:
    kinds: list[Settings] = [{"top_p": 0.9, "temperature": 0.8}, {}, {"temperature": 0.0}]
    logits = torch.randn(3, 500, device=device)
    settings = columns(kinds, 500, device)
    together = sample(logits, **settings)
    order = torch.tensor([2, 0, 1], device=device)
    shuffled = sample(logits[order], **{name: column[order] for name, column in settings.items()})
    assert shuffled.tolist() == together[order].tolist()
    for i in range(3):
        alone = sample(logits[i : i + 1], **{name: column[i : i + 1] for name, column in settings.items()})
        assert int(alone) == int(together[i])


def test_ties_with_the_last_kept_token_are_kept(device: torch.device) -> None:
    """Every bound that reaches one of the three equal values of [0.4, 0.2, 0.2, 0.2] keeps them all."""
    kinds: list[Settings] = [{"top_k": 2}, {"top_p": 0.5}, {"typical_p": 0.5}] * 16
    logits = torch.tensor([0.2, 0.4, 0.2, 0.2]).log().expand(len(kinds), -1).contiguous().to(device)
    drawn = sample(logits, **columns(kinds, 4, device)).tolist()
    assert set(drawn[0::3]) == set(drawn[1::3]) == {0, 1, 2, 3}
    assert set(drawn[2::3]) <= {0, 1, 2, 3} and {0, 2, 3} <= set(drawn[2::3])


# The interpreter's numpy warns of infinities and NaN, on which the kernels rely as in IEEE 754.
@pytest.mark.filterwarnings("ignore:.*encountered in:RuntimeWarning")
def test_rows_with_extreme_logits(device: torch.device) -> None:
    cut: Settings = {"top_k": 5, "top_p": 0.5, "typical_p": 0.5}
    logits = torch.full((8, 300), -torch.inf)
    logits[0, 17] = -1e30  # all except one are forbidden
    logits[1, 250] = 3.0
    logits[2, [3, 280]] = torch.tensor([torch.inf, 1.0])
    logits[4] = torch.nan
    logits[5, 7], logits[5, 9] = torch.nan, 0.5
    logits[6:] = torch.randn(2, 300)
    kinds: list[Settings] = [{}, cut, {"top_p": 0.9}, cut, cut, cut, {"temperature": 1e-44}, {"temperature": 2e-39}]
    drawn = sample(logits.to(device), **columns(kinds, 300, device)).tolist()
    assert drawn[:3] == [17, 250, 3] and drawn[5] == 9
    assert all(0 <= token < 300 for token in drawn[3:5]), "a row without a number still gives a token"
    assert drawn[6:] == logits[6:].argmax(dim=1).tolist()


@pytest.mark.parametrize(("rows", "vocabulary"), [(0, 7), (1, 1), (3, 33), (2, 5001)])
def test_greedy_equals_the_reference(rows: int, vocabulary: int, dtype: torch.dtype, strided: Strided) -> None:
    logits = strided(rows, vocabulary, dtype=dtype)
    assert greedy(logits).tolist() == reference.greedy(logits.cpu()).tolist()


def test_greedy_selects_the_first_of_equals_across_parts(device: torch.device) -> None:
    logits = torch.full((4, 9000), -3.0)
    logits[0, [4000, 4600, 8999]] = -1.0
    logits[1, [8999, 2300]] = 7.0
    logits[2, [5, 8000]] = torch.tensor([-0.0, 0.0])
    logits[3] = -torch.inf
    assert greedy(logits.to(device)).tolist() == [4000, 2300, 5, 0]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_sixteen_bit_logits_are_read_without_conversion(device: torch.device, dtype: torch.dtype) -> None:
    vocabulary = 300
    logits = torch.randn(len(KINDS), vocabulary, generator=torch.Generator().manual_seed(5)).mul(3).to(dtype).to(device)
    logits[2, 7], logits[3, ::3] = torch.nan, -torch.inf
    settings = columns(KINDS, vocabulary, device)
    assert torch.equal(sample(logits, **settings), sample(logits.float(), **settings))
    assert torch.equal(greedy(logits), greedy(logits.float()))
