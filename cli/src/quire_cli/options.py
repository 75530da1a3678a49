"""Parts of options that several commands share."""

from collections.abc import Callable
from typing import Any

import typer

from quire_common.names import is_http_url
from quire_common.quantities import parse_duration_seconds


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


def section(title: str, *, show_default: bool = True) -> Callable[..., Any]:
    """Return the function that creates an option in this section of the help."""

    def option(help: str, *, names: tuple[str, ...] = (), **more: Any) -> Any:
        return typer.Option(*names, help=help, rich_help_panel=title, **{"show_default": show_default, **more})

    return option
