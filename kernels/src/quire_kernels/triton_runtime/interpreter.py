"""Patches for Triton's interpreter. This module is imported only in a process that interprets."""

import dataclasses
from typing import Any

import triton
from triton.runtime import interpreter


def prepare() -> None:
    # The interpreter ignores asserts, whatever a kernel's `debug` is, unless its only builder enables them.
    interpreter.interpreter_builder.options = dataclasses.replace(interpreter.interpreter_builder.options, debug=True)
    if triton.__version__.startswith("3.6."):
        _let_ranges_end_in_tensors()


def _let_ranges_end_in_tensors() -> None:
    """Let a range end in a tensor of one element, which Triton 3.6 converts in a way that NumPy 2.4 rejects.

    Triton 3.7 converts it as this patch does.
    """
    patch = interpreter._patch_lang_tensor

    def patched(tensor: Any, scope: Any) -> None:
        patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    interpreter._patch_lang_tensor = patched
