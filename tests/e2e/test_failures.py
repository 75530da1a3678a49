"""Six invalid changes at once: each reports its cause in time, keeps the serving replica, and is fixed afterwards.

The old replica of each LLMDeployment serves traffic from before the change until after the fix. The results are
recorded once, and the scenarios check them.
"""

import re
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import pytest

from e2e_support.manifests import small_llmdeployment
from e2e_support.objects import Condition, Event, Pod
from e2e_support.release import Release
from e2e_support.results import Report
from e2e_support.run import MakeSpace
from e2e_support.space import LLMDeployment, Space
from e2e_support.traffic import Kind, Traffic, of_kind
from e2e_support.traffic.result import TrafficResult
from e2e_support.waiting import POLL_SECONDS, Stopwatch

pytestmark = pytest.mark.timeout(600)
TOLD_SECONDS = 90.0
MENDED_SECONDS = 90.0
EVENT_SECONDS = 30.0
KEY = "sk-of-the-scenario"
LOST_PYTHON = {"name": "PYTHONHOME", "value": "/nowhere"}
"""A value with which no Python starts, like any program that exits immediately."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """An invalid change to the spec, its expected message, and its fix."""

    change: dict[str, Any]
    reason: str
    says: str
    """A pattern in the message of the condition."""
    back: dict[str, Any] = field(default_factory=dict)
    """The change that reverts it. Empty: the missing object is created instead, and the new replica starts."""


FAULTS = {
    "bad-image": Fault(
        change={"engine": {"image": "{registry}/quire-engine:no-such-tag"}},
        reason="ImagePullFailed",
        says=r"quire-engine:no-such-tag",
        back={"engine": {"image": None}},
    ),
    "bad-model": Fault(
        change={"model": {"source": "file:///models/no-such-model"}},
        reason="EngineRefused",
        says=r"exited with code 2: .*/models/no-such-model",
        back={"model": {"source": "file://./models/quire-demo"}},
    ),
    "out-of-memory": Fault(
        change={"resources": {"limits": {"memory": "120Mi"}, "requests": {"memory": "120Mi"}}},
        reason="OutOfMemory",
        says=r"exceeded its memory limit",
        back={"resources": {"limits": None, "requests": {"memory": "300Mi"}}},
    ),
    "crash-loop": Fault(
        change={"podTemplate": {"spec": {"containers": [{"name": "engine", "env": [LOST_PYTHON]}]}}},
        reason="CrashLooping",
        says=r"exited with code 1: (Fatal Python error|ModuleNotFoundError): .*encodings",
        back={"podTemplate": None},
    ),
    "missing-secret": Fault(
        change={"auth": {"secretName": "keys"}},
        reason="SecretMissing",
        says=r'secret "keys" not found',
    ),
    "impossible-resources": Fault(
        change={"resources": {"requests": {"memory": "100Ti"}}},
        reason="Unschedulable",
        says=r"Insufficient memory",
        back={"resources": {"requests": {"memory": "300Mi"}}},
    ),
}  # fmt: skip


@dataclass(slots=True, kw_only=True)
class Course:
    """The recording of one fault."""

    chat: LLMDeployment
    old: Pod
    reported: Condition | None = None
    reported_after: float | None = None
    others: dict[str, Condition] = field(default_factory=dict)
    """All conditions at that time."""
    events: list[Event] = field(default_factory=list)
    old_then: Pod | None = None
    metric: list[float] = field(default_factory=list)
    mended_after: float | None = None
    old_in_the_end: Pod | None = None
    explained: str = ""
    """The reason if an expected state did not occur in time."""
    traffic: TrafficResult | None = None


@pytest.fixture(scope="module")
def courses(make_space: MakeSpace, release: Release, gateway_url: str) -> Iterator[dict[str, Course]]:
    with make_space("failures") as space, ExitStack() as stack:
        courses = _started(space)
        short = of_kind(Kind.SHORT)
        flows = {
            name: stack.enter_context(Traffic(gateway_url, model=c.chat.model, prompts=short, rate=1, api_key=KEY))
            for name, c in courses.items()
        }
        _break_all(courses, release)
        for name, course in courses.items():
            _look_around(course, FAULTS[name], release)
        _mend_all(courses, space)
        for name, course in courses.items():
            course.traffic = flows[name].stop()
        yield courses


def _started(space: Space) -> dict[str, Course]:
    deployed = {name: space.apply(small_llmdeployment(name)) for name in FAULTS}
    for chat in deployed.values():
        chat.wait_ready(replicas=1, seconds=180)
    return {name: Course(chat=chat, old=chat.serving_pods()[0]) for name, chat in deployed.items()}


def _break_all(courses: dict[str, Course], release: Release) -> None:
    """Apply all faults at once. Return when each has reported its cause, or when the time is up."""
    watches = {}
    registry = release.values["images"]["registry"]
    for name, course in courses.items():
        change = _with_registry(FAULTS[name].change, registry)
        watches[name] = Stopwatch()
        course.chat.patch(**change)

    def look(name: str, course: Course) -> bool:
        conditions = course.chat.conditions()
        degraded = conditions["Degraded"]
        if not (degraded.is_true and degraded.reason == FAULTS[name].reason):
            return False
        course.reported, course.reported_after, course.others = degraded, watches[name].seconds, conditions
        return True

    _wait_for_all(courses, look, TOLD_SECONDS)


def _wait_for_all(courses: dict[str, Course], look: Callable[[str, Course], bool], seconds: float) -> None:
    """Look at each course until it is as expected. Explain those that were not in time."""
    waiting, watch = dict(courses), Stopwatch()
    while waiting and watch.seconds < seconds:
        waiting = {name: course for name, course in waiting.items() if not look(name, course)}
        time.sleep(POLL_SECONDS)
    for course in waiting.values():
        course.explained = course.chat.explain()


def _look_around(course: Course, fault: Fault, release: Release) -> None:
    chat, watch = course.chat, Stopwatch()
    # The operator creates the event after it has written the condition.
    while not _is_warned(course, fault) and watch.seconds < EVENT_SECONDS:
        time.sleep(POLL_SECONDS)
    course.old_then = _old_pod(course)
    labels = {"namespace": chat.namespace, "name": chat.name, "type": "Degraded", "reason": fault.reason}
    course.metric = release.operator_metrics().values("quire_operator_llmdeployment_condition", **labels)


def _is_warned(course: Course, fault: Fault) -> bool:
    course.events = [event for event in course.chat.events() if event.kind == "LLMDeployment"]
    return ("Warning", fault.reason) in {(event.type, event.reason) for event in course.events}


def _mend_all(courses: dict[str, Course], space: Space) -> None:
    watches = {}
    for name, course in courses.items():
        watches[name] = Stopwatch()
        if back := FAULTS[name].back:
            course.chat.patch(**back)
        else:
            space.secret("keys", {"keys": f"name=scenario {KEY}\n"})

    def look(name: str, course: Course) -> bool:
        if not _is_mended(course.chat):
            return False
        course.mended_after, course.old_in_the_end = watches[name].seconds, _old_pod(course)
        return True

    _wait_for_all(courses, look, MENDED_SECONDS)


def _old_pod(course: Course) -> Pod | None:
    return next((pod for pod in course.chat.pods() if pod.uid == course.old.uid), None)


def _is_mended(chat: LLMDeployment) -> bool:
    body, conditions = chat.body(), chat.conditions()
    ready, degraded = conditions["Ready"], conditions["Degraded"]
    return ready.is_true and not degraded.is_true and ready.generation == body["metadata"]["generation"]


def _with_registry(change: Any, registry: str) -> Any:
    if isinstance(change, dict):
        return {key: _with_registry(value, registry) for key, value in change.items()}
    return change.replace("{registry}", registry) if isinstance(change, str) else change


@pytest.mark.parametrize("name", FAULTS)
def test_the_cause_is_reported_and_the_old_replica_serves(
    name: str, courses: dict[str, Course], report: Report
) -> None:
    fault, course = FAULTS[name], courses[name]
    assert course.reported is not None and course.reported_after is not None, course.explained
    report.figure(f"{name.replace('-', ' ')}: change to cause in the conditions", course.reported_after)
    assert re.search(fault.says, course.reported.message, re.DOTALL), course.reported.message
    assert (course.others["Ready"].status, course.others["Ready"].reason) == ("False", fault.reason)
    assert course.others["Available"].is_true, "the old replica answers"
    assert ("Warning", fault.reason) in {(event.type, event.reason) for event in course.events}
    assert course.metric == [1]

    before = (course.old.uid, course.old.restarts, True)
    then = course.old_then
    assert then is not None and (then.uid, then.restarts, then.is_serving) == before
    assert course.mended_after is not None, course.explained
    report.figure(f"{name.replace('-', ' ')}: fixed to Ready", course.mended_after)
    if fault.back:
        after = course.old_in_the_end
        assert after is not None and (after.uid, after.restarts, after.is_serving) == before

    assert course.traffic is not None
    course.traffic.assert_all_right(at_least=10)
    report.count_requests(len(course.traffic.records))
