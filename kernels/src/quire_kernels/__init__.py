"""Attention, linear and sampling kernels of quire for CPUs (numba) and GPUs (Triton)."""

from quire_kernels.precompiled import taken

__version__ = "0.1.0"

taken()  # before anything here imports numba
