"""Traffic during a scenario, and its recording: the messages of the cluster, the count, the timeline below out/e2e."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from e2e_support.results import Report, slug
from e2e_support.space import LLMDeployment
from e2e_support.timeline.model import Timeline, timeline
from e2e_support.timeline.watch import ClusterWatch, sight_of
from e2e_support.traffic import Traffic

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


@contextmanager
def recorded(traffic: Traffic, report: Report, *deployments: LLMDeployment) -> Iterator[Traffic]:
    """Run traffic while the context lasts; check every answer at the end and store the timeline."""
    watch = ClusterWatch(sight_of(*deployments), traffic.now)
    try:
        with traffic, watch:
            yield traffic
    finally:
        result = traffic.stop()
        keep(timeline(report.scenario, result, replicas=watch.replicas, messages=watch.messages, blind=watch.blind))
        report.count_requests(len(result.records))
