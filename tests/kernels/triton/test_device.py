import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import triton.language as tl
from triton.runtime.errors import InterpreterError

from quire_kernels.checks import check_device
from quire_kernels.dispatch import INTERPRETED
from quire_kernels.errors import ArgumentError, UnsupportedDeviceError
from quire_kernels.triton_runtime.debug import kernel
from quire_kernels.triton_runtime.device import (
    OLDEST,
    OLDEST_WITH_FP8,
    DeviceProperties,
    check_capability,
    device_properties,
    require_device,
    require_fp8,
)


def card(name: str, capability: tuple[int, int]) -> DeviceProperties:
    return DeviceProperties(name=name, capability=capability, multiprocessors=80, shared_memory_bytes=96 << 10)


def current(device: torch.device) -> torch.device:
    """Return the device as a tensor on it reports it."""
    return torch.zeros(1, device=device).device


def test_device_runs_the_kernels_and_reports_its_properties(device: torch.device) -> None:
    require_device("op", current(device))
    properties = device_properties(current(device))
    assert properties.name and properties.capability >= (8, 0)
    assert properties.multiprocessors >= 1 and properties.shared_memory_bytes >= 48 << 10


@pytest.mark.parametrize("capability", [(8, 0), (8, 9), (9, 0), (10, 3), (12, 0)])
def test_new_enough_device_is_accepted(capability: tuple[int, int]) -> None:
    check_capability("op", card("some GPU", capability), OLDEST, "the Triton kernels")


@pytest.mark.parametrize(
    ("capability", "oldest", "purpose", "message"),
    [
        ((7, 5), OLDEST, "the kernels", r"op: T4 has compute capability 7\.5; the kernels need 8\.0 or above"),
        ((8, 6), OLDEST_WITH_FP8, "a float8 cache", r"op: T4 has .* 8\.6; a float8 cache needs 8\.9 or above"),
    ],
)
def test_too_old_device_is_refused_with_the_minimum(
    capability: tuple[int, int], oldest: tuple[int, int], purpose: str, message: str
) -> None:
    with pytest.raises(UnsupportedDeviceError, match=message):
        check_capability("op", card("T4", capability), oldest, purpose)


def test_fp8_is_supported_or_refused_by_name(device: torch.device) -> None:
    if device_properties(current(device)).capability >= OLDEST_WITH_FP8:
        require_fp8("op", current(device))
    else:
        with pytest.raises(UnsupportedDeviceError, match=r"float8_e4m3fn needs 8\.9"):
            require_fp8("op", current(device))


def test_operands_on_one_device_are_accepted(device: torch.device) -> None:
    check_device("op", torch.zeros(1, device=device), weight=torch.zeros(3, device=device), bias=None)


@pytest.mark.skipif(INTERPRETED, reason="one device only")
def test_an_operand_elsewhere_is_named(device: torch.device) -> None:
    with pytest.raises(ArgumentError, match="op: weight is on cpu; cuda:0 is needed, where the other operands are"):
        check_device("op", torch.zeros(1, device=device), weight=torch.zeros(3))


@kernel
def _copy_kernel(slots, limit):  # type: ignore[no-untyped-def]
    slot = tl.load(slots)
    tl.device_assert((slot >= 0) & (slot < limit), "copy: slots leave the cache")


@pytest.mark.skipif(not INTERPRETED, reason="a failed assert ends the use of the GPU")
def test_interpreter_checks_values_known_only_on_the_device(device: torch.device) -> None:
    _copy_kernel[(1,)](torch.tensor([4], device=device), 5)
    with pytest.raises(InterpreterError, match="copy: slots leave the cache"):
        _copy_kernel[(1,)](torch.tensor([5], device=device), 5)


_LAUNCH = """
import test_device as these, torch
these._copy_kernel[(1,)](torch.tensor([5], device="cuda"), 5)
torch.cuda.synchronize()
"""


@pytest.mark.skipif(INTERPRETED, reason="the interpreter always checks")
@pytest.mark.parametrize("checked", [True, False])
def test_the_debug_build_alone_checks_on_a_gpu(checked: bool) -> None:
    # Keep PYTHONPATH: outside a virtual environment, as on a borrowed machine, it is what finds the packages.
    path = os.pathsep.join(filter(None, [str(Path(__file__).parent), os.environ.get("PYTHONPATH")]))
    environment = {**os.environ, "QUIRE_KERNELS_CHECK": str(int(checked)), "PYTHONPATH": path}
    done = subprocess.run([sys.executable, "-c", _LAUNCH], env=environment, capture_output=True, text=True, timeout=120)
    assert (done.returncode != 0) == checked
    assert ("copy: slots leave the cache" in done.stderr) == checked
