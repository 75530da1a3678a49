"""Tables on the terminal, and the same rows as JSON."""

import json
import platform
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table


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
