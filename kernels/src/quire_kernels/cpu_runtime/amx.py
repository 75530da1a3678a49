"""The permission that a Linux process needs before it uses AMX, the tiles of Intel's CPUs.

Each thread needs 8 KiB of tile state, so Linux grants AMX only to processes that request it (``ARCH_REQ_XCOMP_PERM``).
Without the permission, the first instruction that touches a tile ends the process with SIGILL. The permission covers
all present and future threads of the process. A granted permission does not prove that the instructions work: on some
virtual machines the CPU reports AMX but traps. Only a disposable process can find that out.
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
    """Request the use of AMX tiles once per process, and return whether Linux grants it.

    Call this before the process starts threads: Linux refuses if a thread has an alternate signal stack that is too
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
    """Return whether kernels may use tiles in this process: the target has AMX, and Linux permits its use."""
    return multiplies_tiles() and request_permission()
