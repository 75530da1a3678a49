"""Ties a process to its parent: what ``python tether.py COMMAND …`` runs ends with its parent, even by kill -9.

On Linux the kernel does it (PR_SET_PDEATHSIG survives exec, so nothing stays between parent and command). Elsewhere
this process stays, with a pipe from its parent as standard input: at the pipe's end it kills the command. Standard
library only and imported by nobody: it is run as a file, to start in milliseconds.
"""

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Sequence
from types import FrameType

_PR_SET_PDEATHSIG = 1
_NOT_FOUND = 127


def main(argv: Sequence[str]) -> int:
    """Becomes the command, or stays beside it; argv is PARENT_PID HOW COMMAND …"""
    parent, how, command = int(argv[0]), argv[1], list(argv[2:])
    if how == "kernel":
        return _become(parent, command)
    return _stay(command)


def _become(parent: int, command: list[str]) -> int:
    import ctypes

    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
        return _stay(command)
    if os.getppid() != parent:  # it died before the kernel knew what to do about it
        return 1
    try:
        os.execvp(command[0], command)
    except OSError as error:
        print(f"{command[0]}: {error.strerror}", file=sys.stderr)
        return _NOT_FOUND


def _stay(command: list[str]) -> int:
    try:
        child = subprocess.Popen(command, stdin=subprocess.DEVNULL)
    except OSError as error:
        print(f"{command[0]}: {error.strerror}", file=sys.stderr)
        return _NOT_FOUND

    def forward(number: int, _: FrameType | None) -> None:
        child.send_signal(number)

    def watch() -> None:
        while os.read(0, 1024):
            pass
        child.kill()

    signal.signal(signal.SIGTERM, forward)
    signal.signal(signal.SIGINT, forward)
    threading.Thread(target=watch, daemon=True).start()
    code = child.wait()
    return code if code >= 0 else 128 - code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
