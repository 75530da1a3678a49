import pytest
import torch

from quire_engine.model.linear import (
    DeterministicLinearBackend,
    LinearBackend,
    OneDnnLinearBackend,
    TorchLinearBackend,
    choose_linear_backend,
    filled_up,
)

DTYPES = [torch.float32, torch.bfloat16]


def backends(dtype: torch.dtype) -> list[LinearBackend]:
    chosen = choose_linear_backend(dtype)
    return [
        TorchLinearBackend(dtype),
        DeterministicLinearBackend(dtype),
        *([chosen] if isinstance(chosen, OneDnnLinearBackend) else []),
    ]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("rows", [1, 2, 7, 33])
@pytest.mark.parametrize("with_bias", [True, False])
def test_every_backend_computes_the_layer(dtype: torch.dtype, rows: int, with_bias: bool) -> None:
    torch.manual_seed(3)
    weight, x = torch.randn(80, 48).to(dtype), torch.randn(rows, 48).to(dtype)
    bias = torch.randn(80).to(dtype) if with_bias else None
    expected = torch.nn.functional.linear(x.float(), weight.float(), None if bias is None else bias.float())
    tolerance = 1e-4 if dtype == torch.float32 else 0.1
    for backend in backends(dtype):
        found = backend.pack(weight, bias)(x)
        assert found.dtype == dtype
        torch.testing.assert_close(found.float(), expected, rtol=2e-2, atol=tolerance)


@pytest.mark.parametrize(
    ("dtype", "name"), [(torch.float32, "float32"), (torch.bfloat16, "bf16"), (torch.float16, "fp16")]
)
def test_backends_say_how_weights_are_held(dtype: torch.dtype, name: str) -> None:
    assert choose_linear_backend(dtype).weights == name


def test_half_precision_is_left_to_torch() -> None:
    assert isinstance(choose_linear_backend(torch.float16), TorchLinearBackend)


def test_few_numbers_of_rows_are_ever_computed() -> None:
    """Each has its own kernels; the processes' environment bounds how many are kept."""
    filled = [filled_up(rows) for rows in range(2049)]
    assert filled[:9] == list(range(9)) and filled[2048] == 2048 and len(set(filled)) == 63
    assert all(rows <= more <= max(rows + 3, rows * 9 / 8) for rows, more in enumerate(filled))
    assert filled == sorted(filled)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_deterministic_backend_gives_a_row_the_same_bits_in_every_batch(dtype: torch.dtype) -> None:
    torch.manual_seed(3)
    layer = choose_linear_backend(dtype, deterministic=True).pack(torch.randn(80, 200).to(dtype), None)
    x = torch.randn(37, 200).to(dtype)
    whole = layer(x)
    for rows in (1, 2, 16, 17):
        assert all(torch.equal(layer(x[begin : begin + rows]), whole[begin : begin + rows]) for begin in (0, 3, 20))


def test_weights_are_not_packed_for_a_gpu() -> None:
    assert isinstance(choose_linear_backend(torch.bfloat16, "cuda"), TorchLinearBackend)
    assert isinstance(choose_linear_backend(torch.bfloat16, "cuda", deterministic=True), DeterministicLinearBackend)
