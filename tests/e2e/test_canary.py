"""Canaries under known-answer traffic: four bad ones are rolled back by themselves, and a good one is promoted.

Three LLMDeployments change at once, each with one stable replica and one of the canary; the one with faults is changed
again after each rollback. The leading operator is killed while canaries have requests. The results are recorded once,
and the scenarios check them.
"""

import os
import re
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import pytest

from e2e_support.canaries import (
    Progress,
    canary_rollout,
    is_of_canary,
    progress,
    provide_faults,
    with_fault,
)
from e2e_support.faults import kill_for_good
from e2e_support.manifests import small_llmdeployment
from e2e_support.objects import Condition, Pod
from e2e_support.release import Release
from e2e_support.results import Report
from e2e_support.run import MakeSpace
from e2e_support.space import LLMDeployment, Space
from e2e_support.target import Target
from e2e_support.traffic import FailureKind, Kind, Record, Traffic, of_kind
from e2e_support.traffic.result import TrafficResult
from e2e_support.waiting import POLL_SECONDS

GOOD = int(os.environ.get("QUIRE_GOOD_CANARIES", "1"))
"""The good canaries, one after the other; more than one are tried by hand."""
STARTED_SECONDS = 300.0
JUDGED_SECONDS = 900.0 + 200.0 * (GOOD - 1)
"""The limit for giving up. The times are measured; a minute of them is the warm-up of replicas."""
pytestmark = pytest.mark.timeout(STARTED_SECONDS + JUDGED_SECONDS)
REPORTED_SECONDS = 30.0
COUNTED = 100
# The replicas share two cores with their clients, so that tails say little.
FIRST_TOKEN, STRICT_FIRST_TOKEN = (
    {"metric": "TimeToFirstToken", "percentile": 50, "maxIncreasePercent": limit} for limit in (100, 40)
)
FEW_ERRORS, NO_ERRORS = ({"metric": "ErrorRate", "maxPercent": limit} for limit in (5, 0))


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A changed spec."""

    change: dict[str, Any]
    rollout: dict[str, Any]
    within: int
    """The requests of the canary within which it must be judged."""
    says: str
    """A pattern in the message of the rollout at its end."""
    clients: int = 2
    kinds: tuple[Kind, ...] = (Kind.SHORT, Kind.DEEP)
    fails: FailureKind | None = None
    """The only failure that requests to the canary may have."""
    is_good: bool = False


CASES = {
    "leak": Case(
        change=with_fault("leak"),
        rollout=canary_rollout(FEW_ERRORS, weight=50, min_requests=300, max_requests=600),
        within=300,
        # The container restarts, and the errors until then may be counted first.
        says="container engine of pod .* restarted: OOMKilled|ErrorRate: .* requests failed",
    ),
    "errors": Case(
        change=with_fault("errors"),
        rollout=canary_rollout(NO_ERRORS, weight=50, min_requests=630, max_requests=1260),
        within=630,
        says="ErrorRate: .* requests failed",
        fails=FailureKind.STATUS,
    ),
    "layer": Case(
        change=with_fault("layer"),
        rollout=canary_rollout(
            {"metric": "Answers"}, FEW_ERRORS, weight=50, min_requests=50, max_requests=2000, answerSamplePercent=100
        ),
        within=600,
        says="Answers: .* compared answers differ",
        fails=FailureKind.WRONG,
    ),
    "slow-under-load": Case(
        change={"engine": {"maxSequences": 1}},
        rollout=canary_rollout(STRICT_FIRST_TOKEN, FEW_ERRORS, weight=50, min_requests=60, max_requests=600),
        within=750,
        says="TimeToFirstToken p50",
        clients=8,
        kinds=(Kind.LONG,),
    ),
    **{
        f"good-{number}": Case(
            change={"engine": {"maxSequences": 6 + number % 2}},
            rollout=canary_rollout(FIRST_TOKEN, FEW_ERRORS, weight=50, min_requests=60, max_requests=1000),
            within=1500,
            says="was promoted",
            is_good=True,
        )
        for number in range(GOOD)
    },
}  # fmt: skip
GOOD_NAMES = tuple(name for name, case in CASES.items() if case.is_good)
LANES = {"faults": ("leak", "errors", "layer"), "slow": ("slow-under-load",), "good": GOOD_NAMES}
"""The canaries of each LLMDeployment, one after the other."""
FAULTY: dict[str, Any] = {"engine": {"resumable": "Enabled"}, "resources": {"limits": {"memory": "1Gi"}}}
"""Fields of both revisions: streams continue elsewhere when a leak has killed their replica."""


@dataclass(slots=True, kw_only=True)
class Course:
    """The recording of one canary."""

    chat: LLMDeployment
    before: list[Pod]
    stable: str
    """The stable revision at first."""
    flow: Traffic
    has_begun: bool = False
    end: Progress | None = None
    seconds: float = 0.0
    conditions: dict[str, Condition] = field(default_factory=dict)
    after: list[Pod] = field(default_factory=list)
    explained: str = ""

    @property
    def traffic(self) -> TrafficResult:
        return self.flow.stop()


@pytest.fixture(scope="module")
def courses(make_space: MakeSpace, release: Release, target: Target, gateway_url: str) -> Iterator[dict[str, Course]]:
    with make_space("canary") as space, ExitStack() as stack:
        provide_faults(space)
        lanes = [Lane(chat, list(LANES[name]), url=gateway_url, stack=stack) for name, chat in _started(space).items()]
        for lane in lanes:
            lane.change()
        _until(lanes, lambda: all(lane.current.has_begun for lane in lanes), STARTED_SECONDS)
        leader = release.wait_leader()
        kill_for_good(target, leader, container="operator")
        _until(lanes, lambda: all(lane.is_over for lane in lanes), JUDGED_SECONDS)
        for lane in lanes:
            lane.give_up()
        release.wait_working()
        yield {name: course for lane in lanes for name, course in lane.courses.items()}


def _started(space: Space) -> dict[str, LLMDeployment]:
    """Start the stable replicas. Their strategy is Canary from the beginning."""
    deployed = {}
    for name, cases in LANES.items():
        fields = {"rollout": CASES[cases[0]].rollout, **(FAULTY if name == "faults" else {})}
        deployed[name] = space.apply(small_llmdeployment(name, **fields))
    for chat in deployed.values():
        chat.wait_ready(replicas=1, seconds=STARTED_SECONDS)
    return deployed


def _until(lanes: list["Lane"], condition: Callable[[], bool], seconds: float) -> None:
    """Poll all canaries until the condition is true or the time is up."""
    began = time.monotonic()
    while not condition() and time.monotonic() < began + seconds:
        for lane in lanes:
            lane.poll()
        time.sleep(POLL_SECONDS)


class Lane:
    """One LLMDeployment, and its canaries one after the other."""

    def __init__(self, chat: LLMDeployment, cases: list[str], *, url: str, stack: ExitStack) -> None:
        self._chat, self._left, self._url, self._stack = chat, cases, url, stack
        self.courses: dict[str, Course] = {}

    @property
    def current(self) -> Course:
        return list(self.courses.values())[-1]

    @property
    def is_over(self) -> bool:
        return self.current.end is not None and not self._left

    def change(self) -> None:
        """Apply the next change under traffic of its own."""
        name = self._left.pop(0)
        case, chat = CASES[name], self._chat
        traffic = Traffic(self._url, model=chat.model, prompts=of_kind(*case.kinds), concurrency=case.clients)
        flow = self._stack.enter_context(traffic)
        stable = [pod for pod in chat.serving_pods() if not is_of_canary(chat, pod.replica)]
        self.courses[name] = Course(chat=chat, before=stable, stable=progress(chat).stable, flow=flow)
        flow.mark("changed")
        chat.patch(**case.change, rollout=case.rollout)

    def poll(self) -> None:
        """Note the progress. After a verdict, end the traffic and apply the next change."""
        course, found = self.current, progress(self._chat)
        if course.end is not None or self._is_of_the_last(found):
            return
        if not course.has_begun and (found.has_requests or found.phase == "RolledBack"):
            course.has_begun = True
            course.flow.mark("has requests")
        is_promoted = found.phase == "Stable" and found.stable != course.stable
        if found.phase != "RolledBack" and not is_promoted:
            return
        course.end = found
        course.seconds = course.flow.mark("judged") - course.flow.so_far().seconds_of("changed")
        course.flow.wait_for_answers(4, "after the verdict")
        course.flow.stop()
        course.conditions, course.after = self._settled_conditions(found), self._chat.pods()
        if self._left:
            self.change()

    def _settled_conditions(self, end: Progress) -> dict[str, Condition]:
        """Return the conditions; those of a rollback are written at the end of the pass that stored the verdict."""

        def look() -> dict[str, Condition] | None:
            found = self._chat.conditions()
            return found if found["Degraded"].is_true or end.phase != "RolledBack" else None

        return self._chat.until(look, what="the conditions report the rollback", seconds=REPORTED_SECONDS)

    def _is_of_the_last(self, found: Progress) -> bool:
        """Return whether the status still shows the canary before the current one."""
        ended = [course.end for course in self.courses.values() if course.end is not None]
        return bool(ended) and found.phase == "RolledBack" and found.rejected == ended[-1].rejected

    def give_up(self) -> None:
        """End the traffic of a canary without a verdict, and keep the facts."""
        if self.current.end is None:
            self.current.explained = f"{progress(self._chat)}\n{self._chat.explain()}"
            self.current.flow.stop()


@pytest.mark.parametrize("name", CASES)
def test_canary_is_judged_by_itself(name: str, courses: dict[str, Course], report: Report) -> None:
    case, course = CASES[name], courses[name]
    assert course.end is not None, course.explained
    assert re.search(case.says, course.end.message), course.end.message
    label = name.replace("-", " ")
    report.figure(f"canary {label}: changed spec to {'promoted' if case.is_good else 'rolled back'}", course.seconds)
    of_canary = [one for one in course.traffic.records if is_of_canary(course.chat, one.replica)]
    report.figure(f"canary {label}: its requests", len(of_canary), "")
    report.count_requests(len(course.traffic.records))
    assert 0 < len(of_canary) <= case.within
    _check_answers(case, course, of_canary)
    if case.is_good:
        assert {pod.uid for pod in course.before}.isdisjoint(pod.uid for pod in course.after if not pod.is_ending)
        assert not course.conditions["Degraded"].is_true
    else:
        degraded = course.conditions["Degraded"]
        assert (degraded.status, degraded.reason) == ("True", "CanaryRolledBack")
        assert course.end.rejected and course.end.stable == course.stable
        kept = {(pod.uid, pod.restarts) for pod in course.before}
        assert kept <= {(pod.uid, pod.restarts) for pod in course.after}, "the stable replicas are untouched"


def _check_answers(case: Case, course: Course, of_canary: list[Record]) -> None:
    """Check that every answer was right, but for those that the fault of the canary explains."""
    if case.fails is None:
        course.traffic.assert_all_right(at_least=50)
        return
    failures = course.traffic.failures
    assert failures, "the canary had its fault"
    assert {one.failure.kind for one in failures if one.failure is not None} == {case.fails}
    assert set(failures) <= set(of_canary), "the stable replica answered rightly throughout"


def test_requests_are_divided_by_the_weight(courses: dict[str, Course], report: Report) -> None:
    course, weight = courses[GOOD_NAMES[0]], CASES[GOOD_NAMES[0]].rollout["canary"]["steps"][0]["weightPercent"]
    assert course.end is not None, course.explained
    result = course.traffic
    answered = [one for one in result.records if one.replica is not None]
    promoting = min((one.started for one in answered if _is_new(one, course)), default=result.seconds)
    # Each gateway reads the weight from the API server at its own time, so that the last requests count.
    records = [one for one in answered if one.started < promoting][-COUNTED:]
    share = 100 * sum(is_of_canary(course.chat, one.replica) for one in records) / len(records)
    report.figure(f"canary good: share of {len(records)} requests with weight {weight} %", share, "%")
    assert abs(share - weight) <= 5


def _is_new(record: Record, course: Course) -> bool:
    """Return whether a stable replica that the promotion started has answered."""
    known = {pod.replica for pod in course.before}
    return record.replica not in known and not is_of_canary(course.chat, record.replica)
