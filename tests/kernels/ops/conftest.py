"""Tests that every implementation of an op has to pass.

A plain `pytest` runs them on a CPU, and on a GPU if there is one; `make kernels-interpreted` runs them in Triton's
interpreter. Tests of one implementation only are next to this folder, or in `triton`.
"""

from importlib.util import find_spec

import pytest
import torch

from quire_kernels.dispatch import INTERPRETED

_ON_CPU = ["cpu"] if INTERPRETED or find_spec("numba") else []
_ON_GPU = ["cuda"] if torch.cuda.is_available() and not INTERPRETED else []


@pytest.fixture(params=[*_ON_CPU, *_ON_GPU])
def device(request: pytest.FixtureRequest) -> torch.device:
    return torch.device(request.param)


@pytest.fixture
def checks_values(device: torch.device) -> None:
    """Skip on a GPU: only the debug build checks values there, and what it finds ends the process."""
    if device.type == "cuda":
        pytest.skip("a GPU checks values in the debug build only")
