"""What a plot may be written as, found out before the work and not after it. For the commands that draw."""

from pathlib import Path

PLOT_FORMATS = (".png", ".svg", ".pdf")


def plot_problem(path: Path) -> str | None:
    """Why nothing can be drawn into this file; None where something can."""
    if path.suffix.lower() in PLOT_FORMATS:
        return None
    return f"--plot {path} should end in {', '.join(PLOT_FORMATS[:-1])} or {PLOT_FORMATS[-1]}"
