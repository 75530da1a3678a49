from collections.abc import Callable

import pytest
import torch
from sampling_settings import Settings, columns, expected
from torch import Tensor

from quire_kernels.dispatch import runs_triton
from quire_kernels.errors import ArgumentError
from quire_kernels.sampling import greedy, reference, sample

Strided = Callable[..., Tensor]
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
# Bounds with 99.99 % of chi-square's mass, by degrees of freedom.
CHI_SQUARE = {4: 23.51, 5: 25.74, 6: 27.86, 7: 29.88, 8: 31.83, 9: 33.72, 10: 35.56, 11: 37.37, 12: 39.13, 13: 40.87}
CHI_SQUARE |= {14: 42.58, 19: 50.80}

pytestmark = pytest.mark.usefixtures("poisoned")


@pytest.mark.parametrize(
    ("counter", "key", "words"),
    [
        ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
        (
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            (0xA4093822, 0x299F31D0),
            (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
        ),
    ],
)
def test_philox_gives_the_published_test_vectors(
    counter: tuple[int, int, int, int], key: tuple[int, int], words: tuple[int, ...]
) -> None:
    assert reference.philox4x32(counter, key) == words


@pytest.mark.parametrize(("vocabulary", "ties"), [(32, True), (1003, False)])
def test_samples_equal_the_reference(
    vocabulary: int, ties: bool, threads: int, device: torch.device, strided: Strided
) -> None:
    kinds = KINDS * (1 if runs_triton(device.type) else 12)  # a launch has rows of all kinds, as a batch does
    logits = 3.0 * strided(len(kinds), vocabulary, dtype=torch.float32)
    if ties:
        logits = logits.round()
    settings = columns(kinds, vocabulary, device)
    assert sample(logits, **settings).tolist() == expected(logits, settings)


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"temperature": 0.6},
        {"top_k": 5},
        {"top_p": 0.8},
        {"min_p": 0.1},
        {"typical_p": 0.8},
        {"top_k": 15, "top_p": 0.95, "min_p": 0.02, "typical_p": 0.9, "temperature": 1.2},
    ],
    ids=str,
)
def test_frequencies_follow_the_distribution(settings: Settings, device: torch.device) -> None:
    if runs_triton(device.type):
        pytest.skip("shown by a CPU, whose samples are those of the reference too")
    draws, vocabulary = 20_000, 20
    logits = torch.randn(vocabulary)
    tokens = sample(logits.expand(draws, -1).contiguous(), **columns([settings] * draws, vocabulary, device))
    keep = reference.keep_mask(
        logits,
        temperature=settings.get("temperature", 1.0),
        top_k=int(settings.get("top_k", vocabulary)),
        top_p=settings.get("top_p", 1.0),
        min_p=settings.get("min_p", 0.0),
        typical_p=settings.get("typical_p", 1.0),
    )
    weights = (logits / settings.get("temperature", 1.0)).softmax(dim=-1) * keep
    wanted = draws * weights[keep] / weights.sum()
    counts = torch.bincount(tokens, minlength=vocabulary)
    assert counts[~keep].sum() == 0
    chi_square = float(((counts[keep] - wanted) ** 2 / wanted).sum())
    assert chi_square < CHI_SQUARE[int(keep.sum()) - 1]


def test_seeds_and_positions_sample_independently() -> None:
    numbers = torch.tensor([[reference.uniform(seed, position) for position in range(40)] for seed in range(40)])
    assert numbers.unique().numel() == 1600
    assert float(numbers.min()) >= 0.0 and float(numbers.max()) < 1.0
    assert float(torch.corrcoef(numbers).fill_diagonal_(0).abs().max()) < 0.7


def test_a_rows_token_does_not_depend_on_its_batch(device: torch.device) -> None:
    kinds: list[Settings] = [{"top_p": 0.9, "temperature": 0.8, "typical_p": 0.8}, {}, {"temperature": 0.0}]
    logits = torch.randn(3, 500, device=device)
    settings = columns(kinds, 500, device)
    together = sample(logits, **settings)
    order = torch.tensor([2, 0, 1], device=device)
    shuffled = sample(logits[order], **{name: column[order] for name, column in settings.items()})
    assert shuffled.tolist() == together[order].tolist()
    for i in range(3):
        alone = sample(logits[i : i + 1], **{name: column[i : i + 1] for name, column in settings.items()})
        assert int(alone) == int(together[i])


def test_typical_tokens_are_those_nearest_to_the_entropy(device: torch.device) -> None:
    # The entropy is 1.17; -log p is 0.69, 1.20, 2.30 and 2.30, so the second is the most typical, then the first.
    bounds = (0.25, 0.5, 0.85, 1.0)
    logits = torch.tensor([0.5, 0.3, 0.1, 0.1]).log().expand(200, -1).contiguous().to(device)
    drawn = sample(logits, **columns([{"typical_p": bound} for bound in bounds] * 50, 4, device)).tolist()
    assert [set(drawn[kind::4]) for kind in range(4)] == [{1}, {0, 1}, {0, 1, 2, 3}, {0, 1, 2, 3}]


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
    logits = torch.full((9, 300), -torch.inf)
    logits[0, 17] = -1e30  # all except one are forbidden
    logits[1, 250] = 3.0
    logits[2, [3, 280]] = torch.tensor([20.0, 1.0])
    logits[4] = torch.nan
    logits[5:8] = torch.randn(3, 300)
    kinds: list[Settings] = [{}, cut, {"top_p": 0.9}, cut, cut]
    # Below 3e-39 the inverse of a temperature overflows float32.
    kinds += [{"temperature": 1e-44}, {"temperature": 2e-39, "typical_p": 0.9}, {"temperature": 1e-20}, {}]
    drawn = sample(logits.to(device), **columns(kinds, 300, device)).tolist()
    assert drawn[:3] == [17, 250, 3]
    assert all(0 <= token < 300 for token in (*drawn[3:5], drawn[8])), "a row without a number still gives a token"
    assert drawn[5:8] == logits[5:8].argmax(dim=1).tolist()
    assert all(0 <= token < 300 for token in greedy(logits.to(device)).tolist())


@pytest.mark.parametrize(("rows", "vocabulary"), [(0, 7), (1, 1), (3, 33), (33, 1024), (2, 5001)])
def test_greedy_equals_the_reference(rows: int, vocabulary: int, dtype: torch.dtype, strided: Strided) -> None:
    logits = strided(rows, vocabulary, dtype=dtype)
    assert greedy(logits).tolist() == reference.greedy(logits.cpu()).tolist()


def test_greedy_selects_the_first_of_equals(device: torch.device) -> None:
    logits = torch.full((5, 9000), -3.0)
    logits[0, [4000, 4600, 8999]] = -1.0
    logits[1, [8999, 2300]] = 7.0
    logits[2, [5, 8000]] = torch.tensor([-0.0, 0.0])
    logits[3] = -torch.inf
    logits[4, [1500, 1600]] = 1.0
    assert greedy(logits.to(device)).tolist() == [4000, 2300, 5, 0, 1500]


@pytest.mark.parametrize(
    ("logits", "change", "message"),
    [
        (torch.zeros(2, 5).int(), {}, "sample: logits is torch.int32"),
        (torch.zeros(2, 0), {}, "sample: logits have shape"),
        (torch.zeros(5, 2).t(), {}, "sample: logits has strides"),
        (torch.zeros(2, 5), {"top_k": torch.ones(2)}, "sample: top_k is torch.float32"),
        (torch.zeros(2, 5), {"temperature": torch.ones(3)}, r"sample: temperature is .*\(2,\) is needed"),
    ],
)
def test_invalid_arguments_are_refused(
    logits: Tensor, change: dict[str, Tensor], message: str, device: torch.device
) -> None:
    given = {**columns([{}, {}], 5, device), **{name: column.to(device) for name, column in change.items()}}
    with pytest.raises(ArgumentError, match=message):
        sample(logits.to(device), **given)


def test_a_cpu_samples_from_float32_only(device: torch.device) -> None:
    if not runs_triton(device.type):
        with pytest.raises(ArgumentError, match="sample: logits are torch.float16; float32 is needed"):
            sample(torch.zeros(2, 5).half(), **columns([{}, {}], 5, device))
