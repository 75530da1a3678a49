"""The files of results, which commands check before their work rather than after it."""

from importlib.util import find_spec
from pathlib import Path

PLOT_FORMATS = (".png", ".svg", ".pdf")


def results_problem(*, json_file: Path | None, plot: Path | None) -> str | None:
    """Return why the results of a command cannot be written to these files; None if they can."""
    if plot is not None and (problem := _plot_problem(plot)) is not None:
        return problem
    for path in (json_file, plot):
        if path is None:
            continue
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.open("ab").close()
        except OSError as error:
            return f"{path} cannot be written: {error.strerror}"
    return None


def _plot_problem(path: Path) -> str | None:
    if find_spec("matplotlib") is None:
        return '--plot needs matplotlib, which is not installed: pip install "quire-cli[plots]"'
    if path.suffix.lower() in PLOT_FORMATS:
        return None
    return f"--plot {path} should end in {', '.join(PLOT_FORMATS[:-1])} or {PLOT_FORMATS[-1]}"
