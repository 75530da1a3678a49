"""The runtime of the CPU ops: compilation with numba, and execution on torch's own threads.

A CPU op is a *worker*: a function with one ``int64`` argument block that repeatedly takes the next item (a row, a head,
a part of a sequence) from a shared counter until all items are taken. ``Worker`` compiles it once per storage type and
caches the machine code on disk. ``launch`` runs it on the OpenMP threads of torch, or adds it to a ``Recording``.
"""

from quire_kernels.cpu_runtime.recording import LayerMemory, Recording, new_tensor, recorded
from quire_kernels.cpu_runtime.workers import CHAIN, Worker, empty, float_bits, launch

__all__ = ["CHAIN", "LayerMemory", "Recording", "Worker", "empty", "float_bits", "launch", "new_tensor", "recorded"]
