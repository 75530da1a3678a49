#!/usr/bin/env python3
"""Save what a command prints on a terminal as an SVG picture for the documentation.

  python tools/screenshot.py docs/images/quire-explain.svg quire explain chat
  python tools/screenshot.py docs/images/quire-top.svg quire top --once --replicas

The command runs on a terminal of its own, so that it prints colours; its exit status is returned. The pictures in the
README show a live run: `quire up -f examples/demo.yaml` with requests sent to it.
"""

import argparse
import io
import os
import pty
import sys
from pathlib import Path

from rich.ansi import AnsiDecoder
from rich.console import Console

_WIDTH, _HEIGHT = 100, 60


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, usage="screenshot.py FILE COMMAND…"
    )
    parser.add_argument("file", type=Path, help="the SVG file to write")
    parser.add_argument("command", nargs=argparse.REMAINDER, help="the command and its arguments")
    arguments = parser.parse_args()
    if not arguments.command:
        parser.error("name the command to run")
    status, output = run_on_terminal(arguments.command)
    console = Console(record=True, width=_WIDTH, file=io.StringIO())
    for line in AnsiDecoder().decode(output.replace("\r\n", "\n").rstrip()):
        console.print(line)
    console.save_svg(str(arguments.file), title=" ".join(arguments.command))
    return status


def run_on_terminal(command: list[str]) -> tuple[int, str]:
    """Return the exit status of the command and what it printed, with its escape sequences."""
    os.environ |= {"COLUMNS": str(_WIDTH), "LINES": str(_HEIGHT), "TERM": "xterm-256color"}
    output = bytearray()

    def keep(descriptor: int) -> bytes:
        data = os.read(descriptor, 65536)
        output.extend(data)
        return data

    status = pty.spawn(command, keep)
    return os.waitstatus_to_exitcode(status), output.decode()


if __name__ == "__main__":
    sys.exit(main())
