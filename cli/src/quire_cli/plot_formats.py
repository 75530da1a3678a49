"""The file formats of plots, which commands check before their work."""

from importlib.util import find_spec
from pathlib import Path

PLOT_FORMATS = (".png", ".svg", ".pdf")


def plot_problem(path: Path) -> str | None:
    """Return why no plot can be written to this file, or None if one can."""
    if find_spec("matplotlib") is None:
        return '--plot needs matplotlib, which is not installed: pip install "quire-cli[plots]"'
    if path.suffix.lower() in PLOT_FORMATS:
        return None
    return f"--plot {path} should end in {', '.join(PLOT_FORMATS[:-1])} or {PLOT_FORMATS[-1]}"
