"""What a person sees of a benchmark: progress while it runs, a table, the same rows as JSON, a plot.

Whether the results can be written is found out before anything is measured. Progress goes to stderr, so that the table
can be piped.
"""

import argparse
import json
import platform
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.progress import Progress
from rich.table import Table

if TYPE_CHECKING:
    from matplotlib.figure import Figure

PLOT_FORMATS = (".png", ".svg", ".pdf")


def parser(description: str | None) -> argparse.ArgumentParser:
    """With the two options that every benchmark has."""
    result = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    outputs = result.add_argument_group("results")
    outputs.add_argument("--json", type=_writable, metavar="FILE", help="write the rows there as well")
    outputs.add_argument("--plot", type=_drawable, metavar="FILE", help="draw them there (.png, .svg or .pdf)")
    return result


def _writable(text: str) -> Path:
    path = Path(text)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.open("ab").close()
    except OSError as error:
        raise argparse.ArgumentTypeError(f"cannot write {path}: {error.strerror}") from None
    return path


def _drawable(text: str) -> Path:
    if Path(text).suffix not in PLOT_FORMATS:
        raise argparse.ArgumentTypeError(f"{text} should end in one of {', '.join(PLOT_FORMATS)}")
    return _writable(text)


def at_least_one(text: str) -> int:
    """For counts."""
    try:
        number = int(text)
    except ValueError:
        number = 0
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text!r} should be a whole number, 1 or more")
    return number


def progress() -> Progress:
    return Progress(console=Console(stderr=True), transient=True)


def machine() -> str:
    model = platform.processor() or platform.machine()
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        names = [line.partition(":")[2].strip() for line in cpuinfo.read_text().splitlines() if "model name" in line]
        model = f"{names[0]}, {len(names)} CPUs" if names else model
    return f"{model}; Python {platform.python_version()}"


def show(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]], notes: Sequence[str] = ()) -> None:
    console = Console(width=None if sys.stdout.isatty() else 120)
    table = Table(title=title, title_justify="left", show_edge=False)
    for number, column in enumerate(columns):
        table.add_column(column, justify="left" if number == 0 else "right")
    for row in rows:
        table.add_row(*row)
    console.print(table)
    for note in (*notes, machine()):
        console.print(note, style="dim", highlight=False)


def save(path: Path | None, rows: Sequence[dict[str, Any]]) -> None:
    if path is not None:
        path.write_text(json.dumps({"machine": machine(), "rows": list(rows)}, indent=1) + "\n", encoding="utf-8")


def new_figure(title: str, *, width: float = 11, height: float = 4.5) -> "Figure":
    from matplotlib.figure import Figure  # slow to import, and only a plot needs it

    figure = Figure(figsize=(width, height), layout="constrained")
    figure.suptitle(title)
    return figure


def save_figure(path: Path, figure: "Figure") -> None:
    figure.savefig(path, dpi=110)
