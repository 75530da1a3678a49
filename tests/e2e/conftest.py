"""Fixtures and hooks of the scenarios: the cluster, the chart, a namespace per scenario, and the final report.

`make e2e` runs the scenarios. No scenario is skipped silently: on our own cluster none may be skipped, and on another
cluster each skipped one is listed with its reason. docs/end-to-end.md describes these tests.
"""

import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from e2e_support import results
from e2e_support.errors import E2EError
from e2e_support.release import Release
from e2e_support.results import Report, slug
from e2e_support.run import MakeSpace, Run
from e2e_support.space import Space
from e2e_support.target import Target, capability, lacking
from quire_cluster.errors import ClusterError
from quire_cluster.helm import Helm
from quire_cluster.progress import Progress
from quire_cluster.pytest_plugin import uncaptured

HERE = Path(__file__).parent
CHART = HERE.parents[1] / "charts" / "quire"
RUN = pytest.StashKey[Run]()
MARKERS = (
    "needs(*capabilities): what the scenario needs of a cluster beyond pods (e2e_support.target)",
    "first: runs before all others",
    "last: runs after all others",
)


def pytest_configure(config: pytest.Config) -> None:
    for marker in MARKERS:
        config.addinivalue_line("markers", marker)
    config.stash[RUN] = Run()


@pytest.hookimpl(tryfirst=True)  # before `-m` chooses
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if HERE in item.path.parents:
            item.add_marker("e2e")
    items.sort(key=lambda item: bool(item.get_closest_marker("last")) - bool(item.get_closest_marker("first")))


def pytest_collection_finish(session: pytest.Session) -> None:
    """Start the cluster before the first scenario, so that its time does not count against a scenario."""
    if session.config.option.collectonly or not any(HERE in item.path.parents for item in session.items):
        return
    with uncaptured(session.config):
        try:
            session.config.stash[RUN].open(os.environ, Progress(sys.stdout))
        except (E2EError, ClusterError) as error:
            session.config.stash[RUN].close()
            pytest.exit(str(error), returncode=1)


def pytest_runtest_setup(item: pytest.Item) -> None:
    target = item.config.stash[RUN].target
    assert target is not None
    needs = [capability(name) for marker in item.iter_markers("needs") for name in marker.args]
    if why := lacking(needs, has=target.capabilities):
        pytest.skip(why)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Any:
    run = item.config.stash[RUN]
    report = yield
    own_report = run.report(item.nodeid)
    own_report.seconds += report.duration
    if report.skipped:
        own_report.outcome = str(call.excinfo.value) if call.excinfo is not None else "skipped"
    elif report.failed:
        own_report.outcome = "failed"
        if folder := run.keep_evidence(item.nodeid, report.longreprtext):
            report.sections.append(("kept for a closer look", str(folder)))
    elif report.when == "call":
        own_report.outcome = "passed"
    return report


def pytest_sessionfinish(session: pytest.Session) -> None:
    run = session.config.stash[RUN]
    if run.target is None:
        return
    run.write()
    if results.fails_the_run(run.reports.values(), on_ours=run.target.machine is not None):
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    run = config.stash[RUN]
    if run.target is None:
        return
    say = terminalreporter.write_line
    terminalreporter.section(f"scenarios on {run.target.name}")
    for line in results.table(list(run.reports.values())):
        say(line)
    skipped = list(results.not_run(run.reports.values()))
    if skipped:
        say("not run on this cluster" + (", which is a failure: ours has all they need" if run.target.machine else ""))
        for line in skipped:
            say(f"  {line}")
    for folder in run.evidence.values():
        say(f"of a failure: {folder}")
    say(f"{run.out / 'results.json'}, and for documents {run.out / 'promises.md'}; {run.seconds:.0f} s in all")


def pytest_unconfigure(config: pytest.Config) -> None:
    with uncaptured(config):
        config.stash[RUN].close()


@pytest.fixture(scope="session")
def run(request: pytest.FixtureRequest) -> Run:
    return request.config.stash[RUN]


@pytest.fixture(scope="session")
def target(run: Run) -> Target:
    """Return the cluster."""
    assert run.target is not None
    return run.target


@pytest.fixture(scope="session")
def release(run: Run, target: Target, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Release]:
    """Install the chart. A release of an earlier run is upgraded to this checkout, and kept afterwards."""
    helm = Helm(target.helm_program, CHART, tmp_path_factory.mktemp("helm"), kubeconfig=Path(target.kube.kubeconfig))
    release = Release(target.kube, helm, target.chart_values)
    was_there = release.found()
    try:
        if was_there:
            release.upgrade()
            release.wait_working()
        else:
            release.install()
        yield release
    finally:
        if not (was_there or run.keep):
            release.uninstall()


@pytest.fixture
def report(run: Run, request: pytest.FixtureRequest) -> Report:
    """Return the report of this scenario: its figures and the number of checked answers."""
    return run.report(request.node.nodeid)


@pytest.fixture(scope="session")
def make_space(run: Run, target: Target, release: Release) -> MakeSpace:
    """Return the context manager `make_space("name")` for namespaces that live longer or shorter than one scenario."""
    return lambda name: run.space(name, target.kube, release.operator_log)


@pytest.fixture
def space(make_space: MakeSpace, request: pytest.FixtureRequest) -> Iterator[Space]:
    """Return an empty namespace of this scenario, which is deleted afterwards."""
    with make_space(slug(request.node.originalname.removeprefix("test_"))) as space:
        yield space


@pytest.fixture(scope="session")
def gateway_url(target: Target, release: Release) -> str:
    """Return the address of the gateway as reached from here; /v1 is below it."""
    return target.service_url(release.namespace, "quire-gateway")
