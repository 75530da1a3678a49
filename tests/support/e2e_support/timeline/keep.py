"""Store a timeline below out/e2e as JSON and as a plot."""

from pathlib import Path

from e2e_support.results import slug
from e2e_support.timeline.model import Timeline

FOLDER = Path(__file__).resolve().parents[4] / "out" / "e2e" / "timelines"


def keep(timeline: Timeline, folder: Path = FOLDER) -> Path:
    """Store the timeline and return the path of the plot."""
    from e2e_support.timeline.plot import draw  # matplotlib is slow to import

    folder.mkdir(parents=True, exist_ok=True)
    name = slug(timeline.title)
    (folder / f"{name}.json").write_text(timeline.as_json())
    picture = folder / f"{name}.png"
    draw(timeline, picture)
    return picture
