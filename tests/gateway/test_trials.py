"""The decisions about requests that were lost with a replica, as pure functions."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire_gateway.trials import Losses, Place, Step, Trials, avoid, most_trials

SAME, OTHER, TRIAL, FAIL = Step.SAME_REPLICA, Step.OTHER_REPLICA, Step.TRIAL, Step.FAIL


@pytest.mark.parametrize(
    ("reasons", "steps"),
    [
        (["disconnected", "disconnected"], [TRIAL, FAIL]),
        (["engine_stopped", "engine_stopped"], [TRIAL, FAIL]),
        (["busy", "unreachable", "unavailable"], [OTHER, OTHER, OTHER]),
        (["engine_stopped", "trial_running", "busy", "unavailable", "disconnected"], [TRIAL] * 4 + [FAIL]),
        # An idle connection that was closed is no death if the replica still answers.
        (["stale", "busy", "unreachable", "disconnected"], [SAME, OTHER, OTHER, TRIAL]),
        # It was one if the replica is gone.
        (["stale", "unreachable", "disconnected"], [SAME, TRIAL, FAIL]),
        (["stale", "unavailable", "engine_stopped"], [SAME, TRIAL, FAIL]),
        (["stale", "stale", "engine_stopped"], [SAME, TRIAL, FAIL]),
        (["engine_stopped", "stale", "unreachable"], [TRIAL, SAME, FAIL]),
    ],
)
def test_request_fails_at_its_second_loss(reasons: list[str], steps: list[Step]) -> None:
    losses, found = Losses(), []
    for reason in reasons:
        losses, step = losses.after(reason, terminating=False)
        found.append(step)
    assert found == steps


def test_planned_end_of_a_replica_counts_once() -> None:
    losses, first = Losses().after("disconnected", terminating=True)
    losses, second = losses.after("disconnected", terminating=True)
    _, third = losses.after("disconnected", terminating=True)
    assert (first, second, third) == (OTHER, TRIAL, FAIL)


def places(*names: str, **marks: Place) -> list[Place]:
    return [marks.get(name, Place(name)) for name in names]


WAITING = Trials(waiting=(1, 2, 3))


@pytest.mark.parametrize(
    ("trials", "found", "chosen"),
    [
        (Trials(), places("a"), None),
        (WAITING, [], None),
        (WAITING, [Place("a", in_flight=3), Place("b", in_flight=1)], "b"),
        (WAITING, [Place("a", in_flight=3), Place("b", is_suspect=True)], "a"),
        (WAITING, [Place("a", in_flight=3), Place("b", is_refusing=True)], "a"),
        (WAITING, [Place("a", is_suspect=True)], None),
        (WAITING, [Place("a", is_refusing=True)], None),
        (Trials((2,), {"a": 1}), places("a", "b", "c"), None),
        (Trials((2,), {"a": 1}), places("a", "b", "c", "d"), "b"),
        # The replica of a trial that goes on may have left.
        (Trials((2,), {"gone": 1}), places("a"), None),
    ],
)
def test_place_of_the_next_trial(trials: Trials, found: list[Place], chosen: str | None) -> None:
    started = trials.start(found)
    assert (None if started is None else started[2]) == chosen
    if started is not None:
        after, request, _ = started
        assert request == trials.waiting[0] and after.waiting == trials.waiting[1:]


def test_failed_replica_is_asked_only_if_all_failed() -> None:
    failed, trusted = Place("a", is_suspect=True), Place("b", in_flight=9)
    for found, chosen in (([failed], "a"), ([failed, trusted], "b")):
        started = WAITING.start(found, ask_suspect=True)
        assert started is not None and started[2] == chosen


def test_refused_trial_is_the_next_one() -> None:
    started = WAITING.start(places("a"))
    assert started is not None
    assert started[0].put_back(1) == WAITING


@pytest.mark.parametrize(
    ("trials", "replicas", "avoided"),
    [({"a": 1}, ["a", "b"], {"a"}), ({"a": 1}, ["a"], set()), ({}, ["a"], set()), ({"gone": 1}, ["a"], set())],
)
def test_other_requests_avoid_a_trial(trials: dict[str, int], replicas: list[str], avoided: set[str]) -> None:
    assert avoid(trials, replicas) == avoided


@given(st.lists(st.tuples(st.sampled_from(["enter", "start", "end", "put_back", "leave"]), st.integers(0, 5))))
def test_each_request_is_in_one_place(events: list[tuple[str, int]]) -> None:
    """A request waits once or runs once, and no replica has two trials."""
    trials, known = Trials(), set[int]()
    found = places("a", "b", "c", "d")
    for event, request in events:
        if event == "enter" and request not in known:
            trials, known = trials.enter(request), known | {request}
        elif event == "start" and (started := trials.start(found)) is not None:
            trials = started[0]
        elif event == "end" and request in trials.running.values():
            trials, known = trials.end(request), known - {request}
        elif event == "put_back" and request in trials.running.values():
            trials = trials.put_back(request)
        elif event == "leave":
            trials, known = trials.leave(request), known - {request}
        everywhere = [*trials.waiting, *trials.running.values()]
        assert sorted(everywhere) == sorted(known)
        assert len(trials.running) <= most_trials(len(found))
