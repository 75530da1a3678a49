"""A process that starts operators quickly: it imports everything once and forks a child for each line of its input.

A line is JSON, as `Operators.start` writes it. The answer is a line with the child's id and the requested log, which
identifies it. The child is the operator's own `app.run`. With `before_write` it sends itself a signal before its n-th
write. When the input ends, all children are killed.
"""

import asyncio
import datetime
import json
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from kubernetes.aio.config import incluster_config

from quire_operator.__main__ import set_up_logging
from quire_operator.app import run as app
from quire_operator.app.settings import parse_settings
from quire_operator.kube import connection as kube_connection


def fail_point(order: dict[str, Any]) -> Callable[[str, str], None]:
    made = 0

    def before_write(verb: str, kind: str) -> None:
        nonlocal made
        made += 1
        line = {"write": made, "verb": verb, "kind": kind}
        print(json.dumps(line), file=sys.stderr, flush=True)
        if order["before_write"] in (made, f"{verb} {kind}"):
            os.kill(os.getpid(), order["signal"])

    return before_write


def skew(seconds: float) -> None:
    """Shift the clock of this process for quire, kopf and the client library."""
    real = time.time

    class Skewed(datetime.datetime):
        @classmethod
        def now(cls, tz: datetime.tzinfo | None = None) -> "Skewed":
            return cls.fromtimestamp(real() + seconds, tz)

    time.time = lambda: real() + seconds
    for name, module in list(sys.modules.items()):
        if name.partition(".")[0] in ("quire_operator", "kopf", "kubernetes"):
            for attribute, value in list(vars(module).items()):
                if value is datetime.datetime:
                    setattr(module, attribute, Skewed)


def be_in_a_pod(folder: Path) -> None:
    """Use the folder in place of the kubelet's mount."""
    incluster_config.SERVICE_TOKEN_FILENAME = str(folder / "token")
    incluster_config.SERVICE_CERT_FILENAME = str(folder / "ca.crt")
    kube_connection._ACCOUNT_FOLDER = folder


def be_operator(order: dict[str, Any]) -> None:
    log = os.open(order["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.environ.update(order["environment"])
    if order["clock_skew_seconds"]:
        skew(order["clock_skew_seconds"])
    if order["service_account"] is not None:
        be_in_a_pod(Path(order["service_account"]))
    settings = parse_settings(order["argv"], {})
    set_up_logging(settings.log_level)
    asyncio.run(app.run(settings, before_write=fail_point(order)))


def main() -> None:
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the kernel reaps the children
    children = []
    print("ready", flush=True)
    for line in sys.stdin:
        order = json.loads(line)
        child = os.fork()
        if child == 0:
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            os.close(0)
            try:
                be_operator(order)
            finally:
                os._exit(0)
        children.append(child)
        print(json.dumps({"pid": child, "log": order["log"]}), flush=True)
    for child in children:
        try:
            os.kill(child, signal.SIGKILL)
        except ProcessLookupError:
            continue


if __name__ == "__main__":
    main()
