"""Timelines: the stored data and the plot, without overlapping elements."""

import json
import threading
import time

import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.text import Text

from e2e_support.errors import ApiError
from e2e_support.timeline import Blind, ClusterWatch, Sight, Steps, keep, timeline
from e2e_support.timeline.lanes import lanes, rows_of
from e2e_support.timeline.plot import figure_of
from e2e_support.traffic.answer import Form
from e2e_support.traffic.prompts import Kind
from e2e_support.traffic.records import Failure, FailureKind, Mark, Record
from e2e_support.traffic.result import TrafficResult


def record(number, started, ended, *, replica="ns/chat-a", failure=None):
    return Record(
        number=number,
        prompt="p",
        kind=Kind.SHORT,
        form=Form.STREAM,
        expected_tokens=3,
        started=started,
        chunk_times=(started + 0.1,),
        ended=ended,
        replica=replica,
        failure=failure,
    )


CUT = Failure(kind=FailureKind.BROKEN, message="reset")
NAMES = ("load rises", "Prometheus is killed", "the leading operator is killed", "another operator leads")


def whole():
    """Return a timeline with four marks within two of sixty seconds, and one at the very end."""
    records = [record(i, i * 0.5, i * 0.5 + 2, replica=f"ns/chat-{'ab'[i % 2]}") for i in range(100)]
    records.append(record(100, 20.0, 20.5, failure=CUT))
    marks = [Mark(seconds=20 + 0.5 * i, name=name) for i, name in enumerate(NAMES)]
    marks.append(Mark(seconds=60, name="what was done at the very end"))
    result = TrafficResult(records=tuple(records), marks=tuple(marks), seconds=61.0, held_back=0)
    steps = (Steps(name="chat desired", points=((0.0, 1), (25.0, 3))), Steps(name="chat ready", points=((0.0, 1),)))
    return timeline("A title", result, replicas=steps, blind=[Blind(start=3.0, end=5.0)])


@pytest.mark.parametrize(
    ("spans", "expected"),
    [
        ([], []),
        ([(0, 1), (1, 2), (2, 3)], [0, 0, 0]),
        ([(0, 3), (1, 2), (1.5, 4), (2, 5)], [0, 1, 2, 1]),
        ([(0, 9), (0, 1), (0, 1), (1, 2)], [0, 1, 2, 1]),
    ],
)
def test_requests_take_the_lowest_free_lane(spans, expected):
    assert lanes(spans) == expected


@pytest.mark.parametrize(
    ("spans", "expected"),
    [
        ([(0, 10), (16, 20)], [0, 0]),
        ([(0, 10), (15, 20)], [0, 1]),
        ([(0, 10), (5, 8), (9, 30), (40, 50)], [0, 1, 2, 0]),
    ],
)
def test_mark_labels_do_not_overlap(spans, expected):
    assert rows_of(spans, apart=6) == expected


def test_mark_labels_stay_separate_and_inside_the_picture():
    figure = figure_of(whole())
    assert isinstance(figure, Figure) and isinstance(figure.canvas, FigureCanvasAgg)
    figure.canvas.draw()
    renderer = figure.canvas.get_renderer()
    # Only the text counts: the extent of an annotation includes its line down to the panel.
    boxes = {text.get_text(): Text.get_window_extent(text, renderer) for text in figure.axes[0].texts}
    # The line of each name goes straight down to its time.
    assert all(text.arrow_patch.get_window_extent(renderer).width < 3 for text in figure.axes[0].texts)
    title = next(text for text in figure.texts if text.get_text() == "A title")
    boxes["A title"] = title.get_window_extent(renderer)
    assert boxes.keys() > set(NAMES)
    boxes |= {axis.get_ylabel(): axis.yaxis.label.get_window_extent(renderer) for axis in figure.axes}
    boxes[figure.axes[-1].get_xlabel()] = figure.axes[-1].xaxis.label.get_window_extent(renderer)
    boxes |= {text.get_text(): text.get_window_extent(renderer) for text in figure.legends[0].get_texts()}
    for name, box in boxes.items():
        assert figure.bbox.x0 <= box.x0 and box.x1 <= figure.bbox.x1 and box.y1 <= figure.bbox.y1, name
        assert not [other for other, theirs in boxes.items() if other != name and box.overlaps(theirs)], name


def test_every_request_is_drawn_and_axes_begin_at_zero():
    figure = figure_of(whole())
    requests, first_tokens, replicas = figure.axes
    _, bars, failed = requests.collections[:3]
    assert len(bars.get_segments()) == 101 and len(failed.get_segments()) == 1
    assert len(first_tokens.collections[0].get_offsets()) == 101
    assert [axis.get_ylim()[0] for axis in figure.axes] == [0, 0, 0]
    assert {axis.get_xlim() for axis in figure.axes} == {(0, 61)}
    assert [line.get_label() for line in replicas.lines[:2]] == ["chat desired", "chat ready"]


def test_timeline_is_saved_as_json_and_picture(tmp_path):
    picture = keep(whole(), tmp_path)
    assert picture.read_bytes().startswith(b"\x89PNG")
    kept = json.loads((tmp_path / "a-title.json").read_text())
    assert len(kept["records"]) == 101
    assert kept["records"][-1]["failure"] is None or kept["records"][-1]["failure"]["kind"] == "broken connection"
    assert kept["marks"][0] == {"seconds": 20, "name": "load rises"}


def test_empty_timeline_can_be_drawn(tmp_path):
    result = TrafficResult(records=(), marks=(), seconds=0.0, held_back=0)
    assert keep(timeline("Nothing", result), tmp_path).exists()


def watched(sights):
    """Return what a watch records from these polls; exceptions among them are raised."""
    left = iter(sights)
    done = threading.Event()

    def look():
        sight = next(left, None)
        if sight is None:
            done.set()
            return sights[-1]
        if isinstance(sight, Exception):
            raise sight
        return sight

    with ClusterWatch(look, time.monotonic, every=0.01) as watch:
        done.wait(2)  # not set if a poll ends the watch
    return watch


def test_cluster_watch_records_changes_and_new_events():
    sights = [
        Sight(replicas={"ready": 1}, states={"chat Ready": "True (Ok)"}, events={"old": "old news"}),
        Sight(replicas={"ready": 1}, states={"chat Ready": "True (Ok)"}, events={"old": "old news"}),
        Sight(replicas={"ready": 2}, states={"chat Ready": "False (Bad)"}, events={"old": "old news", "b": "Killing"}),
    ]
    watch = watched(sights)
    assert [[value for _, value in steps.points] for steps in watch.replicas] == [[1, 2]]
    assert [message.text for message in watch.messages] == ["chat Ready False (Bad)", "Killing"]
    assert watch.blind == []


def test_failed_poll_is_recorded_as_a_gap():
    refused = ApiError("refused", status=None)
    sights = [Sight(replicas={"ready": 1}), refused, refused, Sight(replicas={"ready": 2}), refused, Sight()]
    watch = watched(sights)
    assert [[value for _, value in steps.points] for steps in watch.replicas] == [[1, 2]]
    first, second = watch.blind
    assert first.start < first.end <= second.start


def test_internal_error_of_a_poll_is_raised():
    with pytest.raises(RuntimeError, match="the look at the cluster itself failed"):
        watched([KeyError("x")])
