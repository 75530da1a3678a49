"""Parts of options that several commands share, and those that select a part of a trace and change it."""

from collections.abc import Callable
from typing import Annotated, Any

import typer

from quire_common.names import is_http_url
from quire_common.quantities import parse_duration_seconds

_MOST_FACTOR = 10000


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


def _factor(least: float) -> Any:
    """Return the parser and the placeholder of an option whose value is a factor from ``least`` on."""

    def parse(text: str) -> float:
        try:
            factor = float(text)
        except ValueError:
            factor = 0.0
        if not least <= factor <= _MOST_FACTOR:  # nor is NaN
            raise typer.BadParameter(f'"{text}" is not a number from {least} to {_MOST_FACTOR}')
        return factor

    return {"parser": parse, "metavar": "FACTOR"}


def section(title: str, *, show_default: bool = True) -> Callable[..., Any]:
    """Return the function that creates an option in this section of the help."""

    def option(help: str, *, names: tuple[str, ...] = (), **more: Any) -> Any:
        return typer.Option(*names, help=help, rich_help_panel=title, **{"show_default": show_default, **more})

    return option


of_trace = section("Trace")
of_result = section("Result")

SpeedOption = Annotated[
    float, of_trace("Replay the trace faster by this factor.", names=("--speed",), **_factor(0.001))
]
StartOption = Annotated[float, of_trace("Skip this much of the trace.", **DURATION)]
DurationOption = Annotated[float | None, of_trace("Use only this much of the trace.", **DURATION)]
ScaleInputOption = Annotated[float, of_trace("Multiply prompt lengths.", **_factor(0.0001))]
ScaleOutputOption = Annotated[float, of_trace("Multiply output lengths.", **_factor(0.0001))]
MaxInputOption = Annotated[int | None, of_trace("Truncate longer prompts.", min=1)]
MaxOutputOption = Annotated[int | None, of_trace("Limit longer outputs.", min=1)]
