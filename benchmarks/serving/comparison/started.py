"""Servers under test that a benchmark starts with flags of its own, each for the whole time of the benchmark."""

import asyncio
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from tempfile import mkdtemp

from benchmarks.serving.comparison.levels import highest_level
from benchmarks.serving.comparison.process_tree import ServerError, free_port, running
from benchmarks.serving.comparison.servers import Setting, missing, servers_under_test
from benchmarks.serving.comparison.turns import seconds_to_first_token

PEERS = ("quire", "vllm")
"""The servers that such benchmarks compare."""


def start(stack: ExitStack, name: str, model: Path, flags: Sequence[str] = ()) -> str:
    """Start a server that serves ``model`` under the name "model" and return its address, without ``/v1``.

    It ends with ``stack``. Raise ServerError with the end of its log if it does not start; SystemExit if it is not
    installed.
    """
    server = servers_under_test()[name]
    if reasons := missing([server]):
        raise SystemExit("; ".join(f"{name}: {why}" for name, why in reasons.items()))
    port = free_port()
    assert server.launches is not None
    setting = Setting(model=model, port=port, cpu_level=highest_level(), workloads=(), say=say)
    [launch] = server.launches(setting)
    log = Path(mkdtemp(prefix="quire-benchmark-")) / f"{name}.log"
    say(f"starting {name} {' '.join(flags)}".rstrip())
    try:
        tree = stack.enter_context(running([*launch.command, *flags], launch.environment, log))
        asyncio.run(seconds_to_first_token(tree, f"http://127.0.0.1:{port}/v1"))
    except ServerError as error:
        lines = log.read_text(errors="replace").splitlines()[-12:] if log.is_file() else []
        raise ServerError("\n".join([f"{name} does not start: {error}", *lines])) from None
    return f"http://127.0.0.1:{port}"


def start_each(stack: ExitStack, names: Sequence[str], model: Path, flags: Sequence[str] = ()) -> dict[str, str]:
    """Start servers as ``start`` does, and return the address of each; one that does not start is reported instead."""
    urls: dict[str, str] = {}
    for name in names:
        try:
            urls[name] = start(stack, name, model, flags)
        except ServerError as error:
            say(str(error))
    return urls


def say(text: str) -> None:
    """Report progress."""
    print(text, file=sys.stderr, flush=True)
