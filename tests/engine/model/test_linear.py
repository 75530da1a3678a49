import logging
from collections.abc import Callable

import pytest
import torch

from quire_engine.model.linear import (
    DeterministicLinearBackend,
    FloatLinearBackend,
    HalfLinearBackend,
    Int8LinearBackend,
    LinearBackend,
    PairLinearBackend,
    TorchLinearBackend,
    candidates,
    choose_linear_backend,
    filled_up,
)
from quire_engine.model.linear.selection import Times, fastest, times_in_words
from quire_kernels.packed_linear import supports_bfloat16

DTYPES = [torch.float32, torch.bfloat16]


def backends(dtype: torch.dtype) -> list[LinearBackend]:
    return [DeterministicLinearBackend(dtype), *candidates(dtype, may_round=True)]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("rows", [1, 2, 7, 33])
@pytest.mark.parametrize("with_bias", [True, False])
def test_every_backend_computes_the_layer(dtype: torch.dtype, rows: int, with_bias: bool) -> None:
    torch.manual_seed(3)
    weight, x = torch.randn(80, 48).to(dtype), torch.randn(rows, 48).to(dtype)
    bias = torch.randn(80).to(dtype) if with_bias else None
    expected = torch.nn.functional.linear(x.float(), weight.float(), None if bias is None else bias.float())
    for backend in backends(dtype):
        found, tolerance = backend.pack(weight, bias)(x), {"float32": 1e-4, "fp16": 1e-2, "bf16": 0.1}[backend.weights]
        assert found.dtype == dtype
        torch.testing.assert_close(found.float(), expected, rtol=2e-2, atol=tolerance)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_backend_accepts_a_transposed_weight(dtype: torch.dtype) -> None:
    """GPT-2's weights are transposed: [K, N]."""
    torch.manual_seed(3)
    weight, bias, x = torch.randn(48, 80).to(dtype).t(), torch.randn(80).to(dtype), torch.randn(3, 48).to(dtype)
    for backend in [*backends(dtype), Int8LinearBackend(TorchLinearBackend(dtype))]:
        of_dense = backend.pack(weight.contiguous(), bias)(x)
        assert torch.equal(backend.pack(weight, bias)(x), of_dense), backend.name


@pytest.mark.parametrize(
    ("dtype", "name"), [(torch.float32, "float32"), (torch.bfloat16, "bf16"), (torch.float16, "fp16")]
)
def test_backends_name_the_storage_type_of_weights(dtype: torch.dtype, name: str) -> None:
    assert choose_linear_backend(dtype).weights == name


def test_half_precision_is_left_to_torch() -> None:
    assert isinstance(choose_linear_backend(torch.float16), TorchLinearBackend)


def test_row_counts_are_rounded_to_few_sizes() -> None:
    """Each number has its own kernels; the processes' environment limits how many are cached."""
    filled = [filled_up(rows) for rows in range(2049)]
    assert filled[:9] == list(range(9)) and filled[2048] == 2048 and len(set(filled)) == 63
    assert all(rows <= more <= max(rows + 3, rows * 9 / 8) for rows, more in enumerate(filled))
    assert filled == sorted(filled)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_deterministic_backend_ignores_the_batch_of_a_row(dtype: torch.dtype) -> None:
    torch.manual_seed(3)
    layer = choose_linear_backend(dtype, deterministic=True).pack(torch.randn(80, 200).to(dtype), None)
    x = torch.randn(37, 200).to(dtype)
    whole = layer(x)
    for rows in (1, 2, 16, 17):
        assert all(torch.equal(layer(x[begin : begin + rows]), whole[begin : begin + rows]) for begin in (0, 3, 20))


def test_weights_are_not_packed_for_a_gpu() -> None:
    assert isinstance(choose_linear_backend(torch.bfloat16, "cuda"), TorchLinearBackend)
    assert isinstance(choose_linear_backend(torch.bfloat16, "cuda", deterministic=True), DeterministicLinearBackend)


def test_first_backend_wins_a_tie() -> None:
    assert fastest({"a": (1.0, 4.0, 9.0), "b": (1.0, 4.0, 9.0)}) == "a"


@pytest.mark.parametrize(
    ("times", "chosen"),
    [
        ({"onednn": (0.2, 0.4, 2.0), "torch": (0.3, 0.6, 2.9)}, "onednn"),
        ({"onednn": (0.2, 0.4, 2.0), "torch": (0.19, 0.38, 1.9)}, "onednn"),  # with the noise of a neighbouring process
        ({"onednn": (0.2, 0.4, 9.0), "torch": (0.21, 0.42, 2.0)}, "torch"),  # faster prompts
        ({"onednn": (0.4, 0.8, 2.0), "torch": (0.2, 0.4, 2.6)}, "torch"),  # faster steps that decode
        ({"onednn": (0.2, 0.9, 2.0), "torch": (0.3, 0.4, 2.0)}, "onednn"),  # one sequence has the most steps
        ({"torch": (9.0, 9.0, 9.0)}, "torch"),
    ],
)
def test_fastest_backend_by_a_typical_request_wins(times: Times, chosen: str) -> None:
    assert fastest(times) == chosen


def test_backend_times_are_formatted_in_milliseconds() -> None:
    assert times_in_words({"a": (0.125, 1.0, 2.0), "b": (3.0, 4.0, 50.0)}) == (
        "a 0.12, 1.00 and 2.00 ms; b 3.00, 4.00 and 50.00 ms"
    )


def test_own_kernel_is_a_candidate_in_float32() -> None:
    assert any(isinstance(way, FloatLinearBackend) for way in candidates(torch.float32))
    assert isinstance(choose_linear_backend(torch.float32, deterministic=True), FloatLinearBackend)


def test_backends_name_the_type_of_their_activations() -> None:
    for dtype in DTYPES:
        assert all(backend.dtype == dtype for backend in backends(dtype))


def test_float32_is_stored_as_half_unless_requested() -> None:
    assert not any(isinstance(backend, HalfLinearBackend) for backend in candidates(torch.float32))
    assert not any(isinstance(backend, HalfLinearBackend) for backend in candidates(torch.bfloat16, may_round=True))


def test_layer_beyond_half_precision_keeps_its_weights_with_a_log(caplog: pytest.LogCaptureFixture) -> None:
    weight, x = torch.randn(24, 48), torch.randn(3, 48)
    weight[5, 7] = 70_000.0
    with caplog.at_level(logging.WARNING):
        layer = HalfLinearBackend().pack(weight, None)
    torch.testing.assert_close(layer(x), x @ weight.t())
    assert (
        "a linear layer [24, 48] has the weight 70000, and float16 ends at 65504: its weights stay float32"
        in caplog.text
    )


def test_int8_backend_is_chosen_if_requested() -> None:
    for deterministic in (False, True):
        chosen = choose_linear_backend(torch.float32, quantization="int8", deterministic=deterministic)
        assert isinstance(chosen, Int8LinearBackend) and chosen.weights == "int8" and chosen.bytes_per_weight == 1


def test_int8_layer_is_close_and_a_precise_layer_exact() -> None:
    torch.manual_seed(3)
    backend = choose_linear_backend(torch.float32, quantization="int8")
    weight, bias, x = torch.randn(80, 256), torch.randn(80), torch.randn(33, 256)
    exact = torch.nn.functional.linear(x, weight, bias)
    found = backend.pack(weight, bias)(x)
    assert 1e-4 < (found - exact).std() / exact.std() < 0.02
    torch.testing.assert_close(backend.pack(weight, bias, precise=True)(x), exact, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    "make",
    [
        lambda: choose_linear_backend(torch.bfloat16, quantization="int8"),
        pytest.param(
            PairLinearBackend,
            marks=pytest.mark.skipif(not supports_bfloat16(), reason="this CPU does not multiply pairs of bfloat16"),
        ),
    ],
    ids=["int8", "pairs"],
)
def test_own_kernels_are_bitwise_independent_of_the_batch(make: Callable[[], LinearBackend]) -> None:
    torch.manual_seed(3)
    for inputs in (200, 201):
        layer = make().pack(torch.randn(80, inputs).to(torch.bfloat16), None)
        x = torch.randn(37, inputs).to(torch.bfloat16)
        whole = layer(x)
        for rows in (1, 2, 16, 17):
            assert all(torch.equal(layer(x[begin : begin + rows]), whole[begin : begin + rows]) for begin in (0, 3, 20))
