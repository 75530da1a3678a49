"""What Triton's interpreter lacks for our kernels. Imported only in a process that interprets."""

import dataclasses
from typing import Any

import triton
from triton.runtime import interpreter


def prepare() -> None:
    # The interpreter leaves asserts out, whatever a kernel's `debug` says, unless its one builder has them on.
    interpreter.interpreter_builder.options = dataclasses.replace(interpreter.interpreter_builder.options, debug=True)
    if triton.__version__.startswith("3.6."):
        _let_ranges_end_in_tensors()


def _let_ranges_end_in_tensors() -> None:
    """Triton 3.6 makes numbers of arrays of one element as NumPy 2.4 no longer allows; 3.7 does as is done here."""
    patch = interpreter._patch_lang_tensor

    def patched(tensor: Any, scope: Any) -> None:
        patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    interpreter._patch_lang_tensor = patched
