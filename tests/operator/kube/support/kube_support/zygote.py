"""Starts operators quickly: one process imports everything once, and forks a child for each line on its standard input.

A line is JSON: {"argv": […], "log": "file", "before_write": n or null, "signal": 9}. The answer is a line with the
child's id. The child is the operator's own `app.run`. With `before_write` it sends itself that signal when it is about
to make its n-th write. When the input ends, all children are killed.
"""

import asyncio
import json
import os
import signal
import sys
from collections.abc import Callable
from typing import Any

from quire_operator.__main__ import set_up_logging
from quire_operator.app import run
from quire_operator.settings import parse_settings


def fail_point(chosen: int | None, number: int) -> Callable[[str, str], None]:
    made = 0

    def before_write(verb: str, kind: str) -> None:
        nonlocal made
        made += 1
        print(json.dumps({"write": made, "verb": verb, "kind": kind}), file=sys.stderr, flush=True)
        if made == chosen:
            os.kill(os.getpid(), number)

    return before_write


def be_operator(order: dict[str, Any]) -> None:
    log = os.open(order["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(log, 1)
    os.dup2(log, 2)
    settings = parse_settings(order["argv"], {})
    set_up_logging(settings.log_level)
    asyncio.run(run(settings, before_write=fail_point(order["before_write"], order["signal"])))


def main() -> None:
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the kernel buries the children
    children = []
    print("ready", flush=True)
    for line in sys.stdin:
        child = os.fork()
        if child == 0:
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            os.close(0)
            try:
                be_operator(json.loads(line))
            finally:
                os._exit(0)
        children.append(child)
        print(child, flush=True)
    for child in children:
        try:
            os.kill(child, signal.SIGKILL)
        except ProcessLookupError:
            continue


if __name__ == "__main__":
    main()
