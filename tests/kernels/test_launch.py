"""Launches without Triton's look-up use the kernel that Triton would, over a stand-in for the driver.

The stand-in compares each launch with the signature for which its kernel was compiled.
"""

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from quire_kernels.dispatch import INTERPRETED

triton = pytest.importorskip("triton", reason="torch's CPU build comes without triton")
tl = triton.language

from gpu_stand_in import Launched, LaunchError, StandIn, standing_in  # noqa: E402

from quire_kernels.triton_runtime.debug import kernel  # noqa: E402
from quire_kernels.triton_runtime.launch import Launch  # noqa: E402

pytestmark = pytest.mark.skipif(INTERPRETED, reason="compiles kernels")

FLOATS = torch.zeros(64)


@kernel(varying=["rows"])
def _scale_kernel(x, out, weight, rows, stride, factor, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    place = tl.program_id(0).to(tl.int64) * stride + tl.arange(0, BLOCK)
    value = tl.load(x + place, mask=place < rows, other=0.0) * factor
    if weight is not None:
        value *= tl.load(weight + place, mask=place < rows, other=0.0)
    tl.store(out + place, value, mask=place < rows)


@pytest.fixture
def stand_in() -> Iterator[StandIn]:
    with standing_in(90) as state:
        yield state


ARGUMENTS: dict[str, tuple[Any, ...]] = {
    "all aligned": (FLOATS, FLOATS, None, 7, 16, 0.5),
    "another number of rows": (FLOATS, FLOATS, None, 16, 16, 0.5),
    "one row": (FLOATS, FLOATS, None, 1, 16, 0.5),
    "more rows than 32 bits": (FLOATS, FLOATS, None, 1 << 31, 16, 0.5),
    "an unaligned tensor": (FLOATS[1:], FLOATS, None, 7, 16, 0.5),
    "another unaligned tensor": (FLOATS, FLOATS[1:], None, 7, 16, 0.5),
    "an odd stride": (FLOATS, FLOATS, None, 7, 3, 0.5),
    "a stride of 1": (FLOATS, FLOATS, None, 7, 1, 0.5),
    "another float": (FLOATS, FLOATS, None, 7, 16, 1.0),
    "an optional tensor": (FLOATS, FLOATS, FLOATS, 7, 16, 0.5),
    "another dtype": (FLOATS.half(), FLOATS, None, 7, 16, 0.5),
}


def test_launch_uses_the_same_kernel_as_triton(stand_in: StandIn) -> None:
    launch = Launch(_scale_kernel, BLOCK=16, num_warps=1, num_stages=1)
    seen: list[Launched] = []
    stand_in.observe = seen.append
    for _ in range(2):
        for name, arguments in ARGUMENTS.items():
            seen.clear()
            launch((3, 2), *arguments)
            _scale_kernel[(3, 2)](*arguments, BLOCK=16, num_warps=1, num_stages=1)
            ours, triton_s = seen
            assert ours == triton_s, name
            assert ours.grid == (3, 2, 1)


@pytest.mark.parametrize(
    ("compiled_for", "given", "problem"),
    [
        ("all aligned", "an unaligned tensor", "x is .* multiples of 16"),
        ("all aligned", "an odd stride", "stride is 3, .* multiples of 16"),
        ("all aligned", "more rows than 32 bits", "rows is 2147483648, which i32 cannot hold"),
    ],
)
def test_fake_kernel_refuses_other_specializations(
    stand_in: StandIn, compiled_for: str, given: str, problem: str
) -> None:
    stand_in.observe = lambda launched: None
    found = _scale_kernel.run(*ARGUMENTS[compiled_for], grid=None, warmup=True, BLOCK=16, num_warps=1)
    with pytest.raises(LaunchError, match=f"_scale_kernel: {problem}"):
        found.run(1, 1, 1, 0, found.function, found.packed_metadata, None, None, None, *ARGUMENTS[given], 16)


def test_launch_uses_the_current_stream(stand_in: StandIn) -> None:
    launch = Launch(_scale_kernel, BLOCK=16, num_warps=1, num_stages=1)
    seen: list[Launched] = []
    stand_in.observe = seen.append
    for stream in (5, 9):
        stand_in.current_stream = lambda stream=stream: stream  # type: ignore[misc]
        launch((1,), *ARGUMENTS["all aligned"])
    assert [launched.stream for launched in seen] == [5, 9]
