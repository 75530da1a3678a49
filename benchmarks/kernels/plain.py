"""Tables for a terminal: with rich where it is installed, plainly where it is not (a bare GPU machine)."""

import sys
from collections.abc import Sequence

try:
    from rich.console import Console
    from rich.table import Table
except ImportError:
    Console = Table = None  # type: ignore[assignment,misc]


def show_table(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]], notes: Sequence[str] = ()) -> None:
    if Console is None:
        _show_plainly(title, columns, rows, notes)
        return
    console = Console(width=None if sys.stdout.isatty() else 160)
    table = Table(title=title, title_justify="left", show_edge=False)
    for number, column in enumerate(columns):
        table.add_column(column, justify="left" if number == 0 else "right", no_wrap=number == 0)
    for row in rows:
        table.add_row(*row)
    console.print(table)
    for note in notes:
        console.print(note, style="dim", highlight=False, markup=False)


def _show_plainly(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]], notes: Sequence[str]) -> None:
    lines = [list(columns), *map(list, rows)]
    widths = [max(len(line[column]) for line in lines) for column in range(len(columns))]
    print(f"\n{title}")
    for line in lines:
        padded = [text.rjust(width) for text, width in zip(line, widths, strict=True)]
        print("  ".join([line[0].ljust(widths[0]), *padded[1:]]).rstrip())
    for note in notes:
        print(note)
