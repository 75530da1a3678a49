"""Launches of compiled kernels without Triton's own look-up, which costs the host more than the rest of a launch.

``kernel[grid](...)`` binds the arguments, derives a key from their types and values, and searches the compiled kernel
by the text of that key: 10 to 20 microseconds, some 200 times in an eager step of a large model. A ``Launch`` has its
constants from the start, derives a short key from the other arguments, and calls the compiled kernel with plain
pointers and integers:

    @launches
    def _norm(width: int, target: Target) -> Launch:
        return Launch(_norm_kernel, H=width, **config_for("norm.norm", target).options)

    _norm(width, target)((rows,), x, out, rows, x.stride(0))

The key contains everything on which Triton's specialization depends: the dtype of a tensor and whether its address is a
multiple of 16; the value of an integer (1, and multiples of 16, are special), or only its range of 32 bits if it is
declared as varying; nothing of a float. Triton itself compiles the kernel for a new key, so both agree by construction.
"""

import functools
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

from torch import Tensor
from triton.runtime import driver

from quire_kernels.dispatch import INTERPRETED
from quire_kernels.triton_runtime import config

_P = ParamSpec("_P")
_Launches = TypeVar("_Launches")
_ALIGNMENT_BITS = 15

Argument = Tensor | int | float | None


# Triton's functions of these names can be called from the host too, at several microseconds per call, which adds up to
# milliseconds in an eager step of a large model.
def cdiv(value: int, divisor: int) -> int:
    """Return ``value / divisor``, rounded up; ``divisor`` is positive."""
    return -(-value // divisor)


def next_power_of_2(value: int) -> int:
    """Return the smallest power of two that is at least ``value``; 1 for 0 and negative values."""
    return 1 << (value - 1).bit_length() if value > 1 else 1


class Launch:
    """A kernel with its constants: every ``tl.constexpr`` argument, warps and stages.

    A call launches it on the current stream of the device of its first argument, which must be current. ``grid`` has
    one to three sizes; ``arguments`` are all the others in the kernel's order: tensors, None for an absent one,
    integers and floats. In Triton's interpreter, and on AMD's GPUs, whose specialization also depends on the sizes of
    tensors, the call takes Triton's own path.
    """

    __slots__ = ("_known", "_tail", "_varying", "constants", "kernel")

    def __init__(self, kernel: Any, **constants: Any) -> None:
        self.kernel = kernel
        self.constants = constants
        self._known: dict[tuple[object, ...], Callable[..., None]] = {}
        names = list(kernel.arg_names)
        given = [name for name in names if name in constants]
        count = len(names) - len(given)
        assert names[count:] == given, f"{names[:count]}: the constants of a kernel must come last"
        self._tail = tuple(constants[name] for name in given)
        self._varying = () if INTERPRETED else tuple(parameter.do_not_specialize for parameter in kernel.params[:count])

    def __call__(self, grid: tuple[int, ...], *arguments: Argument) -> None:
        values: list[object] = []
        key: list[object] = []
        addresses = 0
        # strict=False: a wrong number of arguments is found by Triton when it compiles, and costs nothing here.
        for argument, varies in zip(arguments, self._varying, strict=False):
            if isinstance(argument, Tensor):
                address = argument.data_ptr()
                addresses |= address
                values.append(address)
                key.append(argument.dtype)
                continue
            values.append(argument)
            if isinstance(argument, int):
                key.append(argument >> 31 if varies else argument)
            else:
                key.append(argument.__class__)
        if addresses & _ALIGNMENT_BITS:
            key += [
                isinstance(argument, Tensor) and not argument.data_ptr() & _ALIGNMENT_BITS for argument in arguments
            ]
        first = arguments[0]
        assert isinstance(first, Tensor)
        device = first.get_device()
        key.append(device)
        launch = self._known.get(tuple(key))
        if launch is None:
            launch = self._known[tuple(key)] = self._resolve(device, arguments)
        launch(grid, arguments, values)

    def _resolve(self, device: int, arguments: tuple[Argument, ...]) -> Callable[..., None]:
        """Return a function that launches for arguments with the same key; compile the kernel if necessary."""
        if INTERPRETED or driver.active.get_current_target().backend != "cuda":
            kernel, constants = self.kernel, self.constants
            return lambda grid, arguments, values: kernel[grid](*arguments, **constants)
        compiled = self.kernel.run(*arguments, grid=None, warmup=True, **self.constants)
        run, function, packed = compiled.run, compiled.function, compiled.packed_metadata
        stream_of, tail = driver.active.get_current_stream, self._tail

        def launch(grid: tuple[int, ...], arguments: object, values: list[object]) -> None:
            x, y, z = (*grid, 1, 1)[:3]
            # Neither metadata nor hooks of Triton's own profiler.
            run(x, y, z, stream_of(device), function, packed, None, None, None, *values, *tail)

        return launch


def launches(make: Callable[_P, _Launches]) -> Callable[_P, _Launches]:
    """Cache the launches that ``make`` returns, by its arguments, until a configuration changes."""
    cached = functools.cache(make)
    config.on_change(cached.cache_clear)
    return cached  # type: ignore[return-value]  # functools types the arguments as hashable objects
