"""The runtime of the CPU ops: compilation with numba, and execution on torch's own threads.

A CPU op is a *worker*: a function with one ``int64`` argument block that repeatedly takes the next item (a row, a head,
a part of a sequence) from a shared counter until all items are taken. ``Worker`` compiles it once per storage type and
caches the machine code on disk. ``launch`` runs it on the OpenMP threads of torch, at once or with others that were
``deferred``.
"""

from quire_kernels.cpu_runtime.workers import CHAIN, LaunchQueue, Worker, deferred, float_bits, launch

__all__ = ["CHAIN", "LaunchQueue", "Worker", "deferred", "float_bits", "launch"]
