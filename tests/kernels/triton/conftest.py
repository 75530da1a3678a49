"""The Triton kernels: on a GPU if there is one, else interpreted on the CPU. Run by `make kernels-interpreted`.

Triton chooses when a kernel is defined, so these tests have their own process: a plain `pytest` does not collect them.
"""

import pytest
import torch

from quire_kernels.dispatch import INTERPRETED

_HAS_GPU = torch.cuda.is_available()


def pytest_configure() -> None:
    if not INTERPRETED and not _HAS_GPU:
        raise pytest.UsageError("no GPU here: set TRITON_INTERPRET=1, or use `make kernels-interpreted`")


@pytest.fixture
def device() -> torch.device:
    return torch.device("cpu" if INTERPRETED else "cuda")


# The interpreter computes bfloat16 as if its bits were integers, which is silently wrong.
@pytest.fixture(
    params=[torch.float32, torch.float16] if INTERPRETED else [torch.float32, torch.float16, torch.bfloat16],
    ids=lambda dtype: str(dtype).removeprefix("torch."),
)
def dtype(request: pytest.FixtureRequest) -> torch.dtype:
    chosen: torch.dtype = request.param
    return chosen


@pytest.fixture
def poisoned(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fill new memory with NaN or a huge number, which shows reads before a write."""
    empty = torch.empty

    def poisoned_empty(*shape: object, **options: object) -> torch.Tensor:
        made: torch.Tensor = empty(*shape, **options)  # type: ignore[call-overload]
        return made.fill_(torch.nan if made.is_floating_point() else torch.iinfo(made.dtype).max // 3)

    monkeypatch.setattr(torch, "empty", poisoned_empty)
