"""The options that select a part of a trace and change it, for ``quire bench`` and ``quire simulate``."""

from typing import Annotated, Any

import typer

from quire_common.quantities import parse_duration_seconds

TRACE = "Trace"
_MOST_FACTOR = 10000


def _seconds(text: str) -> float:
    seconds = parse_duration_seconds(text)
    if seconds is None:
        raise typer.BadParameter(f'"{text}" is not a duration such as 500ms, 30s, 5m or 1h30m')
    return seconds


DURATION: Any = {"parser": _seconds, "metavar": "DURATION"}
"""The parser and the placeholder of an option whose value is a duration; the command gets it in seconds."""


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


def trace_option(help: str, *, names: tuple[str, ...] = (), **more: Any) -> Any:
    """Return an option in the section of the trace."""
    return typer.Option(*names, help=help, rich_help_panel=TRACE, **more)


SpeedOption = Annotated[
    float, trace_option("Replay the trace faster by this factor.", names=("--speed",), **_factor(0.001))
]
StartOption = Annotated[float, trace_option("Skip this much of the trace.", **DURATION)]
DurationOption = Annotated[float | None, trace_option("Use only this much of the trace.", **DURATION)]
ScaleInputOption = Annotated[float, trace_option("Multiply prompt lengths.", **_factor(0.0001))]
ScaleOutputOption = Annotated[float, trace_option("Multiply output lengths.", **_factor(0.0001))]
MaxInputOption = Annotated[int | None, trace_option("Truncate longer prompts.", min=1)]
MaxOutputOption = Annotated[int | None, trace_option("Limit longer outputs.", min=1)]
