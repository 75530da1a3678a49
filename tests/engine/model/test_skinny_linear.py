import pytest
import torch
from torch import Tensor
from torch.nn import functional

from quire_engine.model.linear import TorchLinearBackend, skinny
from quire_engine.model.linear.skinny import ProductTimes, SkinnyLinear, SkinnyLinearBackend, rows_by_kernel
from quire_kernels.skinny_linear import MAX_ROWS


@pytest.mark.parametrize(
    ("library", "kernel", "problem", "expected"),
    [
        ((10.0,) * 5, (9.0,) * 5, "", set(range(1, 17))),
        ((10.0,) * 5, (9.9,) * 5, "", set()),
        ((10.0, 10.0, 8.0, 10.0, 10.0), (9.0,) * 5, "", {1, 2, *range(5, 17)}),
        ((10.0,) * 5, (9.0, 9.0, 9.0, 11.0, 11.0), "", {1, 2, 3, 4}),
        ((10.0,) * 5, (1.0,) * 5, "failed: its results differ", set()),
        ((0.0,) * 5, (0.0,) * 5, "", set()),
    ],
)
def test_times_decide_by_rows(
    library: tuple[float, ...], kernel: tuple[float, ...], problem: str, expected: set[int]
) -> None:
    rows = rows_by_kernel(ProductTimes(library=library, skinny=kernel, problem=problem))
    assert len(rows) == MAX_ROWS + 1
    assert {count for count, chosen in enumerate(rows) if chosen} == expected


def test_a_layer_takes_the_product_that_was_chosen_for_its_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    by_kernel: list[int] = []

    def multiply(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        by_kernel.append(len(x))
        return functional.linear(x, weight, bias)

    monkeypatch.setattr(skinny, "skinny_linear", multiply)
    rows = tuple(count in (1, 2) for count in range(MAX_ROWS + 1))
    backend = SkinnyLinearBackend(TorchLinearBackend(torch.float32), {(6, 4): rows})
    weight, bias = torch.randn(6, 4), torch.randn(6)
    layer = backend.pack(weight, bias)
    views = [torch.randn(count, 4) for count in (0, 1, 2, 3, 16, 17)]
    for x in (*views, torch.randn(4, 2).t()):
        torch.testing.assert_close(layer(x), functional.linear(x, weight, bias))
    assert by_kernel == [1, 2]
    assert not isinstance(backend.pack(torch.randn(4, 6), None), SkinnyLinear), "a size that was not timed"
    assert backend.name == "torch float32, for few rows also quire's kernel" and backend.weights == "float32"
