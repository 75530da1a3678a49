"""The permission that Linux wants to be asked for before a process uses AMX, the tiles of Intel's CPUs.

A tile state of 8 KiB belongs to each thread, so Linux gives it only to processes that ask (``ARCH_REQ_XCOMP_PERM``).
Without the permission the first instruction that touches a tile ends the process with SIGILL. The permission covers
all threads of the process and all that begin later. A granted permission does not prove that the instructions work:
on some virtual machines the CPU claims them and traps, which only a process that may die can find out.
"""

import ctypes
import functools
import sys

from quire_kernels.cpu_runtime.features import multiplies_tiles

_ARCH_PRCTL = 158
_REQUEST_PERMISSION = 0x1023
_TILE_DATA = 18


@functools.cache
def request_permission() -> bool:
    """Ask Linux for the use of AMX tiles, once for the process, and return whether it is granted.

    A process asks before it starts threads: Linux refuses where a thread has an alternate signal stack that is too
    small for the tiles.
    """
    if not sys.platform.startswith("linux") or sys.maxsize < 1 << 32:
        return False
    try:
        call = ctypes.CDLL(None).syscall
    except (AttributeError, OSError):
        return False
    call.restype = ctypes.c_long
    return bool(call(_ARCH_PRCTL, _REQUEST_PERMISSION, _TILE_DATA) == 0)


def may_use_tiles() -> bool:
    """Return whether kernels multiply by tiles in this process: they are compiled to, and Linux permits it."""
    return multiplies_tiles() and request_permission()
