"""The output of a run: table, Markdown, results.json."""

import pytest

from e2e_support import results
from e2e_support.manifests import merged, small_llmdeployment
from e2e_support.metrics import Page
from e2e_support.results import Report, scenario_name, slug


@pytest.fixture
def reports() -> list[Report]:
    drain = Report(scenario="drain: a node", seconds=61.26, outcome="passed")
    drain.count_requests(40)
    drain.count_requests(2)
    drain.figure("drained in", 31.27)
    drain.figure("replicas", 2, "")
    return [drain, Report(scenario="outages: prometheus", seconds=0.1, outcome="it needs a Prometheus")]


def test_the_table_lines_up_and_sums_up(reports: list[Report]) -> None:
    assert results.table(reports) == [
        "scenario             seconds  requests  figures",
        "drain: a node             61        42  drained in 31.3 s; replicas 2",
        "outages: prometheus        0",
        "all                       61        42",
    ]


def test_markdown_has_a_row_for_each_figure(reports: list[Report]) -> None:
    assert results.markdown(reports).splitlines()[2:] == [
        "| drained in | 31.3 s | drain: a node |",
        "| replicas | 2 | drain: a node |",
    ]


def test_document_has_every_section(reports: list[Report]) -> None:
    document = results.document(reports, cluster="ours", started="2026-01-01T00:00:00+00:00")
    assert document["scenarios"][0] == {
        "scenario": "drain: a node",
        "seconds": 61.26,
        "outcome": "passed",
        "requests": 42,
        "figures": [
            {"name": "drained in", "value": 31.27, "unit": "s"},
            {"name": "replicas", "value": 2.0, "unit": ""},
        ],
        "notes": [],
    }


def test_results_show_notes_next_to_values(reports: list[Report]) -> None:
    reports[0].note("nothing here enforces policies")
    assert results.table(reports)[1].endswith("drained in 31.3 s; replicas 2; nothing here enforces policies")
    assert results.document(reports, cluster="ours", started="")["scenarios"][0]["notes"] == [
        "nothing here enforces policies"
    ]


def test_skipped_scenarios_have_a_reason(reports: list[Report]) -> None:
    assert list(results.not_run(reports)) == ["outages: prometheus: it needs a Prometheus"]


def test_skipped_scenarios_fail_only_on_our_own_cluster(reports: list[Report]) -> None:
    assert results.fails_the_run(reports, on_ours=True)
    assert not results.fails_the_run(reports, on_ours=False)
    assert not results.fails_the_run(reports[:1], on_ours=True)


def test_repeated_measurement_replaces_the_earlier_one(reports: list[Report]) -> None:
    reports[0].figure("drained in", 1)
    assert [figure.value for figure in reports[0].figures] == [2, 1]


@pytest.mark.parametrize(
    ("value", "text"), [(0, "0"), (3.0, "3"), (0.123, "0.12"), (9.87, "9.87"), (12.34, "12.3"), (123.4, "123")]
)
def test_amounts_have_the_digits_that_count(value: float, text: str) -> None:
    assert results.amount(value) == text


@pytest.mark.parametrize(
    ("test_id", "name", "short"),
    [
        ("tests/e2e/test_install.py::test_a_fresh_one", "install: a fresh one", "install-a-fresh-one"),
        ("test_node_drain.py::test_it[Two Nodes]", "node drain: it [Two Nodes]", "node-drain-it-two-nodes"),
    ],
)
def test_scenario_titles_follow_test_names(test_id: str, name: str, short: str) -> None:
    assert scenario_name(test_id) == name
    assert slug(name) == short


def test_a_merge_patch_does_not_change_its_base() -> None:
    base = {"a": {"b": 1, "c": 2}, "d": [1]}
    assert merged(base, {"a": {"b": None, "e": {"f": 3}}, "d": [2], "g": 4}) == {
        "a": {"c": 2, "e": {"f": 3}},
        "d": [2],
        "g": 4,
    }
    assert base == {"a": {"b": 1, "c": 2}, "d": [1]}
    assert merged({"a": 1}, {"a": {"b": 2}}) == {"a": {"b": 2}}


def test_small_llmdeployment_can_be_customized() -> None:
    made = small_llmdeployment("chat", replicas=2, engine={"maxSequences": 1}, drain=None)
    assert made["metadata"] == {"name": "chat"}
    assert made["spec"]["replicas"] == 2 and "drain" not in made["spec"]
    assert made["spec"]["engine"]["maxSequences"] == 1 and made["spec"]["engine"]["kvCache"] == {"size": "64Mi"}


def test_metrics_page_is_queried_by_name_and_labels() -> None:
    page = Page(
        '# TYPE writes counter\nwrites_total{kind="Pod",verb="apply"} 2\nwrites_total{kind="Service",verb="apply"} 3\n'
        "# TYPE leading gauge\nleading 1\n"
    )
    assert page.total("writes_total") == 5
    assert page.values("writes_total", kind="Pod", verb="apply") == [2]
    assert page.total("leading") == 1
    assert page.total("missing") == 0 and page.values("missing") == []
