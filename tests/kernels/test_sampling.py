import pytest
import torch
from torch import Tensor

from quire_kernels.errors import ArgumentError
from quire_kernels.sampling import greedy, reference, sample

# Bounds with 99.99 % of chi-square's mass, by degrees of freedom.
CHI_SQUARE = {
    4: 23.51,
    5: 25.74,
    6: 27.86,
    7: 29.88,
    8: 31.83,
    9: 33.72,
    10: 35.56,
    11: 37.37,
    12: 39.13,
    13: 40.87,
    14: 42.58,
    19: 50.80,
}


def columns(
    rows: int,
    vocabulary: int,
    *,
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float = 1.0,
    min_p: float = 0.0,
    typical_p: float = 1.0,
    seed: int = 1,
) -> dict[str, Tensor]:
    return {
        "temperature": torch.full((rows,), temperature),
        "top_k": torch.full((rows,), vocabulary if top_k is None else top_k),
        "top_p": torch.full((rows,), top_p),
        "min_p": torch.full((rows,), min_p),
        "typical_p": torch.full((rows,), typical_p),
        "seeds": torch.full((rows,), seed),
        "positions": torch.arange(rows),
    }


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


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"temperature": 0.3},
        {"top_k": 1},
        {"top_k": 7},
        {"top_p": 0.5},
        {"top_p": 1e-6},
        {"top_p": 0.999},
        {"min_p": 0.2},
        {"min_p": 1.0},
        {"typical_p": 0.5},
        {"typical_p": 1e-6},
        {"typical_p": 0.999, "temperature": 0.2},
        {"top_k": 6, "typical_p": 0.4},
        {"top_p": 0.9, "typical_p": 0.7, "temperature": 1.5},
        {"temperature": 2.0, "top_k": 40, "top_p": 0.8, "min_p": 0.01},
        {"seed": -1},
        {"seed": -(1 << 63)},
    ],
    ids=str,
)
@pytest.mark.parametrize("vocabulary", [1, 7, 40, 1000, 3001])
def test_samples_equal_the_reference(settings: dict[str, float], vocabulary: int, threads: int) -> None:
    logits = 3.0 * torch.randn(60, vocabulary + 3)[:, :vocabulary]  # rows apart
    if int(settings.get("top_k", 1)) > vocabulary:
        settings = {**settings, "top_k": vocabulary}
    drawn = columns(60, vocabulary, **settings)  # type: ignore[arg-type]
    assert sample(logits, **drawn).tolist() == reference.sample(logits, **drawn).tolist()


def test_zero_temperature_is_greedy_among_sampled_rows() -> None:
    logits = torch.randn(4, 50)
    settings = columns(4, 50)
    settings["temperature"] = torch.tensor([0.0, 1.0, 0.0, 0.7])
    tokens = sample(logits, **settings)
    assert tokens[[0, 2]].tolist() == logits[[0, 2]].argmax(dim=-1).tolist()
    assert tokens.tolist() == reference.sample(logits, **settings).tolist()


@pytest.mark.parametrize("typical_p", [1.0, 0.9])
@pytest.mark.parametrize("temperature", [1e-2, 1e-20, 1e-38, 2e-39, 1e-44])
def test_near_zero_temperature_samples_the_most_likely_token(temperature: float, typical_p: float) -> None:
    """Below 3e-39 its inverse overflows float32."""
    logits = torch.randn(4, 1000, generator=torch.Generator().manual_seed(0))
    drawn = sample(logits, **columns(4, 1000, temperature=temperature, typical_p=typical_p))
    assert torch.equal(drawn, greedy(logits))


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"temperature": 0.6},
        {"top_k": 5},
        {"top_k": 10, "temperature": 1.5},
        {"top_p": 0.8},
        {"min_p": 0.1},
        {"typical_p": 0.8},
        {"top_k": 15, "top_p": 0.95, "min_p": 0.02, "typical_p": 0.9, "temperature": 1.2},
    ],
    ids=str,
)
def test_frequencies_follow_the_distribution(settings: dict[str, float]) -> None:
    draws, vocabulary = 20_000, 20
    logits = torch.randn(vocabulary)
    tokens = sample(logits.expand(draws, -1).contiguous(), **columns(draws, vocabulary, **settings))  # type: ignore[arg-type]
    keep = reference.keep_mask(
        logits,
        temperature=settings.get("temperature", 1.0),
        top_k=int(settings.get("top_k", vocabulary)),
        top_p=settings.get("top_p", 1.0),
        min_p=settings.get("min_p", 0.0),
        typical_p=settings.get("typical_p", 1.0),
    )
    weights = (logits / settings.get("temperature", 1.0)).softmax(dim=-1) * keep
    expected = draws * weights[keep] / weights.sum()
    counts = torch.bincount(tokens, minlength=vocabulary)
    assert counts[~keep].sum() == 0
    chi_square = float(((counts[keep] - expected) ** 2 / expected).sum())
    assert chi_square < CHI_SQUARE[int(keep.sum()) - 1]


def test_seeds_and_positions_sample_independently() -> None:
    numbers = torch.tensor([[reference.uniform(seed, position) for position in range(40)] for seed in range(40)])
    assert numbers.unique().numel() == 1600
    assert float(numbers.min()) >= 0.0 and float(numbers.max()) < 1.0
    assert float(torch.corrcoef(numbers).fill_diagonal_(0).abs().max()) < 0.7


def test_a_rows_token_does_not_depend_on_its_batch() -> None:
    logits = torch.randn(9, 500)
    settings = columns(9, 500, top_p=0.9, typical_p=0.8)
    together = sample(logits, **settings)
    order = torch.randperm(9)
    shuffled = sample(logits[order].contiguous(), **{name: column[order] for name, column in settings.items()})
    assert shuffled.tolist() == together[order].tolist()
    for i in range(9):
        alone = sample(logits[i : i + 1], **{name: column[i : i + 1] for name, column in settings.items()})
        assert int(alone) == int(together[i])


def test_typical_tokens_are_those_nearest_to_the_entropy() -> None:
    # The entropy is 1.17; -log p is 0.69, 1.20, 2.30 and 2.30, so the second is the most typical, then the first.
    logits = torch.tensor([0.5, 0.3, 0.1, 0.1]).log().expand(400, -1)
    drawn = {
        typical_p: set(sample(logits, **columns(400, 4, typical_p=typical_p)).tolist())
        for typical_p in (0.25, 0.5, 0.85, 1.0)
    }
    assert drawn == {0.25: {1}, 0.5: {0, 1}, 0.85: {0, 1, 2, 3}, 1.0: {0, 1, 2, 3}}


def test_forbidden_tokens_are_never_sampled() -> None:
    logits = torch.full((2000, 5), -torch.inf)
    logits[:, [1, 3]] = 0.0
    assert set(sample(logits, **columns(2000, 5)).tolist()) == {1, 3}


def test_row_of_nan_still_gives_a_token() -> None:
    logits = torch.full((3, 300), torch.nan)
    logits[1] = -torch.inf
    tokens = sample(logits, **columns(3, 300, top_k=5, top_p=0.5, typical_p=0.5))
    assert all(0 <= token < 300 for token in tokens.tolist())
    assert all(0 <= token < 300 for token in greedy(logits).tolist())


@pytest.mark.parametrize(("rows", "vocabulary"), [(1, 1), (3, 50), (33, 1003), (5, 1024), (5, 4100)])
def test_greedy_equals_the_reference(rows: int, vocabulary: int, dtype: torch.dtype, threads: int) -> None:
    logits = torch.randn(rows, vocabulary + 5).to(dtype)[:, :vocabulary]
    assert greedy(logits).tolist() == reference.greedy(logits).tolist()


def test_greedy_selects_the_first_of_equal_logits() -> None:
    assert greedy(torch.tensor([[0.0, 2.0, 2.0, 1.0], [-1.0, -0.0, 0.0, -1.0]])).tolist() == [1, 1]
    far = torch.full((2, 5000), -3.0)
    far[0, [1500, 1600, 4000]], far[1, [4999, 1024]] = -1.0, 7.0
    assert greedy(far).tolist() == [1500, 1024]


@pytest.mark.parametrize(
    ("logits", "change", "message"),
    [
        (torch.zeros(2, 5).half(), {}, "sample: logits are torch.float16; float32 is needed"),
        (torch.zeros(2, 0), {}, "sample: logits have shape"),
        (torch.zeros(5, 2).t(), {}, "sample: logits has strides"),
        (torch.zeros(2, 5), {"top_k": torch.ones(2)}, "sample: top_k is torch.float32"),
        (torch.zeros(2, 5), {"temperature": torch.ones(3)}, r"sample: temperature is .*\(2,\) is needed"),
    ],
)
def test_invalid_arguments_are_refused(logits: Tensor, change: dict[str, Tensor], message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        sample(logits, **{**columns(2, 5), **change})
