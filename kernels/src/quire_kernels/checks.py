"""Argument checks that the ops share.

They run on every launch, so they only read attributes and compare them.

Legend: rows may have any stride, but the last dimension must be dense, because ops never copy a tensor to make it
dense.
"""

from typing import NoReturn

import torch
from torch import Tensor

from quire_kernels.errors import ArgumentError

STORAGE_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def refuse(op: str, argument: str, problem: str) -> NoReturn:
    raise ArgumentError(f"{op}: {argument} {problem}")


def check_device(op: str, like: Tensor, **operands: Tensor | None) -> None:
    """Raise ArgumentError unless all operands are on the device of ``like``."""
    index = like.get_device()
    for argument, tensor in operands.items():
        # The index is the cheapest attribute to read.
        if tensor is not None and tensor.get_device() != index:
            refuse(op, argument, f"is on {tensor.device}; {like.device} is needed, where the other operands are")


def check_storage(op: str, argument: str, tensor: Tensor) -> None:
    """Raise ArgumentError unless the dtype is in STORAGE_DTYPES and the last dimension is dense."""
    if tensor.dtype not in STORAGE_DTYPES:
        refuse(op, argument, f"is {tensor.dtype}; float32, bfloat16 or float16 is needed")
    if tensor.stride(-1) != 1:
        refuse(op, argument, f"has strides {tuple(tensor.stride())}; the last dimension must be dense (stride 1)")


def check_dense(op: str, argument: str, tensor: Tensor, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    """Raise ArgumentError unless ``tensor`` has exactly this dtype and shape and is contiguous."""
    if tensor.dtype != dtype or tensor.shape != shape or not tensor.is_contiguous():
        found = f"{tensor.dtype} {tuple(tensor.shape)} with strides {tuple(tensor.stride())}"
        refuse(op, argument, f"is {found}; a contiguous {dtype} {shape} is needed")


def check_like(op: str, argument: str, tensor: Tensor, like: Tensor) -> None:
    """Raise ArgumentError unless ``tensor`` has the dtype and shape of ``like`` and a dense last dimension."""
    if tensor.dtype != like.dtype or tensor.shape != like.shape:
        found = f"{tensor.dtype} {tuple(tensor.shape)}"
        refuse(op, argument, f"is {found}; {like.dtype} {tuple(like.shape)} is needed")
    if tensor.stride(-1) != 1:
        refuse(op, argument, f"has strides {tuple(tensor.stride())}; the last dimension must be dense (stride 1)")
