"""Shared parts of ``quire explain`` and ``quire top``: options, redrawing in place, output to a pipe."""

import asyncio
import os
import sys
from collections.abc import Coroutine
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console, RenderableType
from rich.live import Live

from quire_common.names import is_http_url

_PLAIN_WIDTH = 120

PLACE = "Cluster or local run"

NamespaceOption = Annotated[
    str | None,
    typer.Option(
        "--namespace", "-n", help="The namespace on the cluster (default: the context's).", rich_help_panel=PLACE
    ),
]
KubeconfigOption = Annotated[
    str | None, typer.Option(metavar="FILE", help="Path to the kubeconfig file.", rich_help_panel=PLACE)
]
ContextOption = Annotated[
    str | None, typer.Option(metavar="NAME", help="The context of the kubeconfig to use.", rich_help_panel=PLACE)
]
LocalOption = Annotated[
    bool,
    typer.Option(
        "--local", help="Use runs on this machine only, including runs that have ended.", rich_help_panel=PLACE
    ),
]
RunOption = Annotated[
    Path | None,
    typer.Option(metavar="FILE", help="Use the run of this YAML file on this machine.", rich_help_panel=PLACE),
]


def url(text: str) -> str:
    """Parse an option that is an address."""
    if not is_http_url(text):
        raise typer.BadParameter(f'"{text}" is not an http or https URL such as http://127.0.0.1:9090')
    return text


def now() -> datetime:
    return datetime.now(UTC)


def plain_console() -> Console:
    """Return a console as wide as the terminal, and with a fixed width in a pipe."""
    console = Console(highlight=False)
    return console if console.is_terminal else Console(highlight=False, width=_PLAIN_WIDTH)


class Redrawn:
    """A screen on a terminal that is redrawn in place and stays when the command ends."""

    def __init__(self, console: Console) -> None:
        self.console = console
        self._live = Live(console=console, auto_refresh=False, vertical_overflow="crop")

    def __enter__(self) -> "Redrawn":
        self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._live.stop()

    def render(self, picture: RenderableType) -> None:
        self._live.update(picture, refresh=True)


def until_interrupted(work: Coroutine[Any, Any, None]) -> None:
    """Run until Ctrl-C, or until the reader of the pipe is gone; neither is an error."""
    try:
        asyncio.run(work)
    except KeyboardInterrupt:
        pass
    except BrokenPipeError:  # as after `quire top --json | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
