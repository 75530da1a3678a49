"""The parent-death watcher: a command that it runs ends when the parent process ends, even by kill -9.

On Linux the kernel ends it (PR_SET_PDEATHSIG survives exec, so no process stays between parent and command). Elsewhere
this process stays, with a pipe from its parent as standard input, and kills the command when the pipe closes. It uses
the standard library only and is run as a file, so that it starts in milliseconds.
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
    """Become the command, or watch it; argv is PARENT_PID, HOW and the command."""
    parent, how, command = int(argv[0]), argv[1], list(argv[2:])
    if how == "kernel":
        return _become(parent, command)
    return _stay(command)


def _become(parent: int, command: list[str]) -> int:
    import ctypes

    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
        return _stay(command)
    if os.getppid() != parent:  # the parent died before the kernel was informed
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
