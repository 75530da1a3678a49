"""Helpers of a local run: the installed commands, the port, the log, racing tasks."""

import asyncio
import errno
import logging
import shutil
import socket
import sys
from collections.abc import Awaitable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from quire_cli.errors import AddressProblem, StartProblem
from quire_cli.local.supervision import LOOPBACK, free_port
from quire_common.contract.engine import ENGINE_COMMAND, FETCH_COMMAND
from quire_common.contract.gateway import GATEWAY_COMMAND


@dataclass(frozen=True, slots=True, kw_only=True)
class Commands:
    """The commands that start engines and the gateway."""

    engine: tuple[str, ...]
    gateway: tuple[str, ...]


def installed_commands() -> Commands:
    """Return the commands next to this Python, else those on PATH; raise StartProblem."""
    return Commands(engine=(installed(ENGINE_COMMAND),), gateway=(installed(GATEWAY_COMMAND),))


def installed(name: str) -> str:
    """Return the path of a command, which is next to this Python or on PATH. Raises StartProblem."""
    own = Path(sys.executable).with_name(name)
    found = str(own) if own.exists() else shutil.which(name)
    if found is None:
        distribution = "quire-engine" if name == FETCH_COMMAND else name
        hint = f"install it next to quire: pip install {distribution} (or make setup, in a clone of the repository)"
        raise StartProblem(f"the command {name} is not installed", hint=hint)
    return found


def check_port(port: int) -> None:
    """Raise AddressProblem if the port cannot be listened on."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((LOOPBACK, port))
        except OSError as error:
            reasons = {errno.EADDRINUSE: "is in use", errno.EACCES: "requires more permissions than you have"}
            reason = reasons.get(error.errno or 0, f"cannot be listened on: {error.strerror}")
            raise AddressProblem(f"port {port} {reason}", hint=f"use another port: --port {free_port()}") from None


class _Log(logging.FileHandler):
    """A log file that drops lines on a full disk, without a message on the terminal."""

    def handleError(self, record: logging.LogRecord) -> None: ...

    def close(self) -> None:
        with suppress(OSError):
            super().close()


@contextmanager
def logging_to(file: Path) -> Iterator[None]:
    """Log this process to a file, because the terminal shows the table."""
    handler = _Log(file, encoding="utf-8")
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    loggers = [logging.getLogger(name) for name in ("quire_cli", "quire_operator", "quire_common")]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.addHandler(handler)
        logger.level = logging.INFO
    try:
        yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.removeHandler(handler)
            logger.level = level
        handler.close()


async def race(*runners: Awaitable[object]) -> None:
    """Wait until one finishes, cancel the others, and raise an error of any."""
    tasks = [asyncio.ensure_future(runner) for runner in runners]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()
        results = await asyncio.gather(*tasks, return_exceptions=True)
    for result in results:
        if isinstance(result, BaseException) and not isinstance(result, asyncio.CancelledError):
            raise result
