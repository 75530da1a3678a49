"""What both views need of a terminal or a pipe: options, redrawing in place, lines that may lose their reader."""

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

PLACE = "Where to look"

NamespaceOption = Annotated[
    str | None,
    typer.Option("--namespace", "-n", help="On the cluster; the context's own if left out.", rich_help_panel=PLACE),
]
KubeconfigOption = Annotated[
    str | None, typer.Option(metavar="FILE", help="Look at the cluster it leads to.", rich_help_panel=PLACE)
]
ContextOption = Annotated[
    str | None, typer.Option(metavar="NAME", help="Another context of the kubeconfig.", rich_help_panel=PLACE)
]
LocalOption = Annotated[
    bool, typer.Option("--local", help="Look at this machine only, at runs that are over too.", rich_help_panel=PLACE)
]
RunOption = Annotated[
    Path | None,
    typer.Option(metavar="FILE", help="The run of this YAML file on this machine.", rich_help_panel=PLACE),
]


def url(text: str) -> str:
    if not is_http_url(text):
        raise typer.BadParameter(f'"{text}" is not an http or https URL such as http://127.0.0.1:9090')
    return text


def now() -> datetime:
    return datetime.now(UTC)


def plain_console() -> Console:
    """For people; as wide as the terminal, and wide enough in a pipe."""
    console = Console(highlight=False)
    return console if console.is_terminal else Console(highlight=False, width=_PLAIN_WIDTH)


class Redrawn:
    """One picture on a terminal that is drawn over, and stays when it ends."""

    def __init__(self, console: Console) -> None:
        self.console = console
        self._live = Live(console=console, auto_refresh=False, vertical_overflow="crop")

    def __enter__(self) -> "Redrawn":
        self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._live.stop()

    def draw(self, picture: RenderableType) -> None:
        self._live.update(picture, refresh=True)


def until_interrupted(work: Coroutine[Any, Any, None]) -> None:
    """Run it; Ctrl-C, and a reader that has seen enough, are ways to end it and no mistakes."""
    try:
        asyncio.run(work)
    except KeyboardInterrupt:
        pass
    except BrokenPipeError:  # as after `quire top --json | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
