"""The Triton kernels: on a GPU if there is one, else interpreted on the CPU. Run by `make kernels-interpreted`.

Triton chooses when a kernel is defined, so these tests have their own process: a plain `pytest` does not collect them.
"""

import dataclasses
from collections.abc import Callable, Iterator

import pytest
import torch

from quire_kernels.dispatch import INTERPRETED
from quire_kernels.triton_runtime import config
from quire_kernels.triton_runtime.config import LaunchConfig
from quire_kernels.triton_runtime.target import Target

_HAS_GPU = torch.cuda.is_available()


def pytest_configure() -> None:
    if not INTERPRETED and not _HAS_GPU:
        raise pytest.UsageError("no GPU here: set TRITON_INTERPRET=1, or use `make kernels-interpreted`")


@pytest.fixture
def device() -> torch.device:
    return torch.device("cpu" if INTERPRETED else "cuda")


@pytest.fixture
def use_blocks(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., None]]:
    """Yield a function that gives the launches of a kernel other blocks until the test ends."""

    def use(kernel: str, **blocks: int) -> None:
        look_up = config._look_up

        def changed(name: str, target: Target, key: str) -> LaunchConfig:
            found = look_up(name, target, key)
            return dataclasses.replace(found, blocks={**found.blocks, **blocks}) if name == kernel else found

        monkeypatch.setattr(config, "_look_up", changed)
        config.forget()

    yield use
    monkeypatch.undo()
    config.forget()
