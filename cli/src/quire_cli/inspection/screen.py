"""Shared parts of ``quire explain`` and ``quire top``: options, redrawing in place, output to a pipe."""

import asyncio
from collections.abc import Coroutine
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any

from rich.console import Console
from rich.live import Live

from quire_cli.options import discard_output, section

of_place = section("Cluster or local run")

NamespaceOption = Annotated[
    str | None, of_place("The namespace on the cluster (default: the context's).", names=("--namespace", "-n"))
]
KubeconfigOption = Annotated[str | None, of_place("Path to the kubeconfig file.", metavar="FILE")]
ContextOption = Annotated[str | None, of_place("The context of the kubeconfig to use.", metavar="NAME")]
LocalOption = Annotated[
    bool, of_place("Use runs on this machine only, including runs that have ended.", names=("--local",))
]
RunOption = Annotated[Path | None, of_place("Use the run of this YAML file on this machine.", metavar="FILE")]


def now() -> datetime:
    return datetime.now(UTC)


def redrawn(console: Console) -> Live:
    """Return a screen on a terminal that is redrawn in place and stays when the command ends."""
    return Live(console=console, auto_refresh=False, vertical_overflow="crop")


def until_interrupted(work: Coroutine[Any, Any, None]) -> None:
    """Run until Ctrl-C, or until the reader of the pipe is gone; neither is an error."""
    try:
        asyncio.run(work)
    except KeyboardInterrupt:
        pass
    except BrokenPipeError:  # as after `quire top --json | head`
        discard_output()
