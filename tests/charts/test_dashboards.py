"""Every panel of every dashboard shows data in the unit that it names, from what the real exporters export."""

import json
import math
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from chart_support import recording
from chart_support.documents import find, of_kind
from chart_support.prometheus import RecordedPrometheus

from quire_cluster.helm import Helm

DASHBOARDS = sorted((Path(__file__).parents[2] / "charts" / "quire" / "dashboards").glob("*.json"))
BOARDS = {file.stem: json.loads(file.read_text()) for file in DASHBOARDS}
VARIABLES = {
    "deployment": {"namespace": recording.NAMESPACE, "model": recording.MODEL},
    "operator": {"namespace": recording.OPERATOR_NAMESPACE},
}
UNITS = {"none", "s", "percentunit", "reqps", "ops", "cpm", "bytes", "suffix: tok/s"}
WIDTH = 24


@pytest.fixture(scope="module")
def prometheus(
    prometheus_programs: Mapping[str, Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[RecordedPrometheus]:
    prometheus = RecordedPrometheus(recording.openmetrics(), tmp_path_factory.mktemp("prometheus"))
    yield prometheus
    prometheus.close()


def panels(board: str, *, rows: bool = False) -> list[dict[str, Any]]:
    return [panel for panel in BOARDS[board]["panels"] if rows or panel["type"] != "row"]


def expression(board: str, target: dict[str, Any]) -> str:
    """Return the query that Grafana sends, with the variables replaced."""
    text: str = target["expr"]
    for name, value in {**VARIABLES[board], "__rate_interval": "1m"}.items():
        text = text.replace(f"${name}", value)
    assert "$" not in text, text
    return text


TARGETS = [
    pytest.param(board, panel, target, id=f"{board}: {panel['title']} {target['refId']}")
    for board in BOARDS
    for panel in panels(board)
    for target in panel["targets"]
]
each_board = pytest.mark.parametrize("board", BOARDS)


@pytest.mark.parametrize(("board", "panel", "target"), TARGETS)
def test_panel_shows_numbers_under_a_distinct_legend(
    prometheus: RecordedPrometheus, board: str, panel: dict[str, Any], target: dict[str, Any]
) -> None:
    asked = expression(board, target)
    series = prometheus.over(asked, start=recording.START + 120, end=recording.END, step=recording.STEP)
    values = [float(value) for one in series for _, value in one["values"]]
    assert values and all(map(math.isfinite, values)), asked
    if panel["type"] == "stat":
        assert len(series) == 1
        return
    if panel["type"] == "table":
        return
    legends = [_legend(target["legendFormat"], one["metric"]) for one in series]
    assert len(set(legends)) == len(legends) and all(legends), legends


def _legend(form: str, labels: dict[str, str]) -> str:
    return re.sub(r"\{\{\s*(\w+)\s*\}\}", lambda match: labels[match[1]], form)


@pytest.mark.parametrize(
    ("board", "title", "legend", "value"),
    [
        ("deployment", "Ready replicas", "", 2),
        ("deployment", "Running", "", 16),
        ("deployment", "Waiting", "", 6),
        ("deployment", "Output tokens", "", 2 * recording.TOKENS_PER_SECOND),
        ("deployment", "KV cache in use", "", 0.5),
        ("deployment", "Finished requests", "stop", 2 * recording.REQUESTS_PER_SECOND),
        ("deployment", "Received and rejected requests", "received", 2 * recording.REQUESTS_PER_SECOND),
        ("deployment", "Tokens", "prompts computed", 4 * recording.TOKENS_PER_SECOND),
        ("deployment", "Available KV blocks by replica", "chat-0", 0.5),
        ("deployment", "Prefix cache", "hits", 0.5),
        ("deployment", "Step time by part", "run", 0.8),
        ("deployment", "Replicas", "asked", 3),
        ("deployment", "Replicas", "starting", 1),
        ("deployment", "Replicas", "decided", 3),
        ("deployment", "Replicas", "maxReplicas", 8),
        ("deployment", "Demand by signal", "ArrivingWork", 2.6),
        ("deployment", "Answers by status", "503", 1 / 15),
        ("deployment", "Held requests", "held", 2),
        ("operator", "Leading", "", 1),
        ("operator", "Reconciles", "reconciles", 1),
        ("operator", "Failed reconciles", "Unavailable", 1 / 15),
        ("operator", "Decisions", "Steady", 4),
        ("operator", "Time since the last answer of Prometheus", "since the last answer", 5),
        ("operator", "Watch lag", "", 1.5),
    ],
)
def test_panel_shows_the_recorded_activity(
    prometheus: RecordedPrometheus, board: str, title: str, legend: str, value: float
) -> None:
    (panel,) = [panel for panel in panels(board) if panel["title"] == title]
    shown = {
        _legend(target.get("legendFormat", ""), one["metric"]): float(one["value"][1])
        for target in panel["targets"]
        for one in prometheus.instant(expression(board, target), at=recording.END)
    }
    assert shown[legend] == pytest.approx(value, rel=0.01)


@pytest.mark.parametrize(
    ("title", "low", "high"),
    [("Time to first token", 0.25, 0.5), ("Inter-token latency", 0.01, 0.025), ("End-to-end latency", 2.0, 2.5)],
)
def test_latencies_are_shown_in_their_bucket(
    prometheus: RecordedPrometheus, title: str, low: float, high: float
) -> None:
    (panel,) = [panel for panel in panels("deployment") if panel["title"] == title]
    shown = [prometheus.instant(expression("deployment", t), at=recording.END) for t in panel["targets"]]
    values = [float(series[0]["value"][1]) for series in shown]
    assert len(values) == 3 and values == sorted(values) and low <= values[0] <= values[-1] <= high


@each_board
def test_dashboard_variables_list_existing_values(prometheus: RecordedPrometheus, board: str) -> None:
    datasource, *queries = BOARDS[board]["templating"]["list"]
    assert (datasource["type"], datasource["query"]) == ("datasource", "prometheus")
    assert [variable["name"] for variable in queries] == list(VARIABLES[board])
    for variable in queries:
        match = re.fullmatch(r"label_values\((.+), (\w+)\)", variable["query"]["query"])
        assert match is not None
        selector = expression(board, {"expr": match[1]})
        found = {one["metric"][match[2]] for one in prometheus.instant(selector, at=recording.END)}
        assert VARIABLES[board][variable["name"]] in found


@each_board
def test_panels_do_not_overlap_and_have_descriptions(board: str) -> None:
    taken: set[tuple[int, int]] = set()
    for panel in panels(board, rows=True):
        place = panel["gridPos"]
        cells = {(place["x"] + dx, place["y"] + dy) for dx in range(place["w"]) for dy in range(place["h"])}
        assert place["x"] + place["w"] <= WIDTH and not cells & taken, panel["title"]
        taken |= cells
    rows = {y for _, y in taken}
    assert rows == set(range(max(rows) + 1)), "no empty bands"
    ids = [panel["id"] for panel in panels(board, rows=True)]
    titles = [panel["title"] for panel in panels(board)]
    assert len(set(ids)) == len(ids) and len(set(titles)) == len(titles)
    for panel in panels(board):
        assert panel["description"].endswith("."), panel["title"]
        assert panel["fieldConfig"]["defaults"]["unit"] in UNITS
        for target in (panel, *panel["targets"]):
            assert target["datasource"] == {"type": "prometheus", "uid": "${datasource}"}


def test_monitors_scrape_like_the_recording(helm: Helm) -> None:
    documents = helm.template({"monitoring": {"podMonitors": {"enabled": True, "labels": {"release": "prometheus"}}}})
    monitors = {monitor["metadata"]["name"]: monitor for monitor in of_kind(documents, "PodMonitor")}
    assert monitors.keys() == {"quire-operator", "quire-gateway"}
    for name, exporter in (("quire-operator", recording.Operator), ("quire-gateway", recording.Gateway)):
        monitor = monitors[name]
        assert monitor["metadata"]["labels"]["release"] == "prometheus"
        (endpoint,) = monitor["spec"]["podMetricsEndpoints"]
        assert endpoint.get("honorLabels", False) is exporter.target.honours_labels
        template = find(documents, "Deployment", name)["spec"]["template"]
        assert monitor["spec"]["selector"]["matchLabels"].items() <= template["metadata"]["labels"].items()
        assert endpoint["port"] in [port["name"] for port in template["spec"]["containers"][0]["ports"]]


def test_dashboards_have_unique_ids_and_link_to_each_other() -> None:
    assert sorted(BOARDS) == ["deployment", "operator"]
    assert len({board["uid"] for board in BOARDS.values()}) == 2
    for board in BOARDS.values():
        assert "quire" in board["tags"] and board["links"][0]["tags"] == ["quire"]
        assert board.keys().isdisjoint({"id", "__inputs"}), "nothing of the Grafana it was made with"


def test_dashboard_config_maps_are_complete_and_labelled(helm: Helm) -> None:
    documents = helm.template({"monitoring": {"dashboards": {"enabled": True, "annotations": {"folder": "quire"}}}})
    maps = of_kind(documents, "ConfigMap")
    assert [m["metadata"]["name"] for m in maps] == ["quire-dashboard-deployment", "quire-dashboard-operator"]
    for made, name in zip(maps, sorted(BOARDS), strict=True):
        assert made["metadata"]["labels"]["grafana_dashboard"] == "1"
        assert made["metadata"]["annotations"] == {"folder": "quire"}
        assert {file: json.loads(text) for file, text in made["data"].items()} == {f"quire-{name}.json": BOARDS[name]}
