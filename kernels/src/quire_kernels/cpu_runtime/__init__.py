"""What the CPU implementations of the ops share: compiling with numba, and running on torch's own threads.

A CPU op is a *worker*: a function over one ``int64`` argument block that takes items (rows, heads, pieces of a
sequence) off a shared counter until none is left. ``Worker`` turns it into machine code once per storage type and keeps
it on disk; ``launch`` runs it on the OpenMP threads that torch already has.
"""

from quire_kernels.cpu_runtime.workers import Worker, float_bits, launch

__all__ = ["Worker", "float_bits", "launch"]
