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
