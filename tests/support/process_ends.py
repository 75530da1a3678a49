"""The end of any process, also of one that is no child."""

import os
import select


def process_ends(pid: int, timeout: float) -> bool:
    """Wait for the end of a process and return True if it came in time."""
    try:
        descriptor = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    try:
        return bool(select.select([descriptor], [], [], timeout)[0])
    finally:
        os.close(descriptor)
