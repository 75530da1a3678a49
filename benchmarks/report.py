"""The options, tables and JSON files that the benchmarks have in common.

An output path is checked before anything is measured. Progress goes to stderr, so that the table can be piped. Tables
do not need rich, because a bare GPU machine does not have it.
"""

import argparse
import json
import os
import platform
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

try:
    from rich.console import Console
    from rich.table import Table
except ImportError:
    Console = Table = None  # type: ignore[assignment,misc]

if TYPE_CHECKING:
    from rich.progress import Progress

ROOT = Path(__file__).resolve().parents[1]
DEMO_MODEL = ROOT / "examples" / "models" / "quire-demo"


def parser(description: str | None) -> argparse.ArgumentParser:
    """Return a parser with the output options that benchmarks share."""
    result = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    outputs = result.add_argument_group("results")
    outputs.add_argument("--json", type=writable, metavar="FILE", help="write the rows to this file as well")
    return result


def writable(text: str) -> Path:
    """Parse an output path from the command line, and refuse one that cannot be written."""
    path = Path(text)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.open("ab").close()
    except OSError as error:
        raise argparse.ArgumentTypeError(f"cannot write {path}: {error.strerror}") from None
    return path


def at_least_one(text: str) -> int:
    """Parse a count from the command line."""
    try:
        number = int(text)
    except ValueError:
        number = 0
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text!r} should be a whole number, 1 or more")
    return number


def usable_cpus() -> list[int]:
    """Return the CPUs that this process may run on."""
    return sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else list(range(os.cpu_count() or 1))


def machine() -> str:
    """Describe the processor and the Python version in one line."""
    model = platform.processor() or platform.machine()
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        names = [line.partition(":")[2].strip() for line in cpuinfo.read_text().splitlines() if "model name" in line]
        model = f"{names[0]}, {len(names)} CPUs" if names else model
    return f"{model}; Python {platform.python_version()}"


def cpu_seconds(pid: int) -> float:
    """Return the user and system time of a process; 0 where the system has no /proc."""
    stat = Path(f"/proc/{pid}/stat")
    if not stat.exists():
        return 0.0
    fields = stat.read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def progress() -> "Progress":
    from rich.progress import Progress

    return Progress(console=Console(stderr=True), transient=True)


def show_table(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]], notes: Sequence[str] = ()) -> None:
    """Print a table, with rich where it is installed and as plain text where it is not."""
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


def save(path: Path | None, rows: Sequence[dict[str, Any]]) -> None:
    """Write the rows and the machine to ``path``; do nothing without one."""
    if path is not None:
        write_json(path, {"machine": machine(), "rows": list(rows)})


def write_json(path: Path, content: Any) -> None:
    """Replace ``path`` in one move, so that an interrupted run leaves a complete file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_name(path.name + ".new")
    unfinished.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    unfinished.replace(path)


def interrupt_on_terminate() -> None:
    """Turn SIGTERM into KeyboardInterrupt, so that a time limit still prints the rows so far."""

    def interrupt(number: int, frame: object) -> None:
        raise KeyboardInterrupt

    signal.signal(signal.SIGTERM, interrupt)
