"""The Triton kernels: on a GPU where there is one, else interpreted on the CPU. Run by `make kernels-interpreted`.

Triton decides as a kernel is defined, so these tests have a process of their own: a plain `pytest` does not enter here.
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


# The interpreter computes bfloat16 as if its bits were integers: it is silently wrong there.
@pytest.fixture(
    params=[torch.float32, torch.float16] if INTERPRETED else [torch.float32, torch.float16, torch.bfloat16],
    ids=lambda dtype: str(dtype).removeprefix("torch."),
)
def dtype(request: pytest.FixtureRequest) -> torch.dtype:
    chosen: torch.dtype = request.param
    return chosen
