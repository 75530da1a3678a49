"""Parts of the command line that several commands share: kinds of options, and the output."""

import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from quire_common.names import is_http_url
from quire_common.quantities import parse_duration_seconds

_PLAIN_WIDTH = 120


def _seconds(text: str) -> float:
    seconds = parse_duration_seconds(text)
    if seconds is None:
        raise typer.BadParameter(f'"{text}" is not a duration such as 500ms, 30s, 5m or 1h30m')
    return seconds


def _url(text: str) -> str:
    if not is_http_url(text):
        raise typer.BadParameter(f'"{text}" is not an http or https URL such as http://127.0.0.1:8000')
    return text


DURATION: Any = {"parser": _seconds, "metavar": "DURATION"}
"""The parser and the placeholder of an option whose value is a duration; the command gets it in seconds."""
URL: Any = {"parser": _url, "metavar": "URL"}
FileOption = Annotated[Path, typer.Option("--file", "-f", help="A YAML file with one or more LLMDeployments.")]


def section(title: str, *, show_default: bool = True) -> Callable[..., Any]:
    """Return the function that creates an option in this section of the help."""

    def option(help: str, *, names: tuple[str, ...] = (), **more: Any) -> Any:
        return typer.Option(*names, help=help, rich_help_panel=title, **{"show_default": show_default, **more})

    return option


def plain_console() -> Console:
    """Return a console as wide as the terminal, and with a fixed width in a pipe."""
    console = Console(highlight=False)
    return console if console.is_terminal else Console(highlight=False, width=_PLAIN_WIDTH)


def discard_output() -> None:
    """Keep the interpreter from writing again to a pipe without a reader, or to a full disk."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
