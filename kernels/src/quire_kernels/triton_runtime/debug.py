"""Checks that only the device can perform: of positions, slots and block ids, whose values the host does not know.

``QUIRE_KERNELS_CHECK=1`` in the environment at start selects the debug build: kernels are compiled with their
``tl.device_assert``, and a wrong value stops the device with a line on standard error that names op and argument. The
process is then lost, because CUDA has no other way. Otherwise the asserts leave no trace in the machine code. Triton's
interpreter always checks and raises, because a wrong address would end the process without a message.

A kernel with asserts is declared with ``@kernel`` instead of ``@triton.jit``, and uses the messages of the CPU:

    @kernel
    def _gather_kernel(...):
        tl.device_assert((slot >= 0) & (slot < num_slots), "gather: slots leave the cache")
"""

import dataclasses
import os
from collections.abc import Callable, Sequence
from typing import Any

import triton

from quire_kernels.dispatch import INTERPRETED

CHECKED = INTERPRETED or os.environ.get("QUIRE_KERNELS_CHECK") == "1"

if INTERPRETED:
    from triton.runtime import interpreter

    # The interpreter ignores asserts, whatever a kernel's `debug` is, unless its only builder enables them.
    interpreter.interpreter_builder.options = dataclasses.replace(interpreter.interpreter_builder.options, debug=True)
    if triton.__version__.startswith("3.6."):
        _patch = interpreter._patch_lang_tensor

        def _let_ranges_end_in_tensors(tensor: Any, scope: Any) -> None:
            """Convert a tensor of one element as Triton 3.7 does; NumPy 2.4 rejects the way of 3.6."""
            _patch(tensor, scope)
            scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

        interpreter._patch_lang_tensor = _let_ranges_end_in_tensors


def kernel(function: Callable[..., None] | None = None, *, varying: Sequence[str] = ()) -> Any:
    """Return ``triton.jit`` of the function, which keeps its ``tl.device_assert`` if ``CHECKED``.

    varying  integer arguments that differ from step to step: Triton would otherwise compile the kernel again during
             serving when one of them becomes 1 or a multiple of 16
    """
    decorator = triton.jit(debug=CHECKED, do_not_specialize=list(varying))
    return decorator if function is None else decorator(function)
