"""The decisions about requests that were lost with a replica, as pure functions."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire_common.contract.gateway import CANARY, STABLE
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


RESUME = Step.RESUME


@pytest.mark.parametrize(
    ("events", "steps"),
    [
        # A stream with tokens is tried with others first, and alone after its second loss.
        ([("disconnected", True)] * 3, [RESUME, TRIAL, FAIL]),
        ([("engine_stopped", False), ("engine_stopped", True), ("disconnected", True)], [TRIAL, TRIAL, FAIL]),
        ([("moved", True), ("busy", True), ("disconnected", True)], [OTHER, OTHER, RESUME]),
        ([("disconnected", True), ("trial_running", True), ("disconnected", True)], [RESUME, RESUME, TRIAL]),
    ],
)
def test_stream_with_tokens_fails_at_its_third_loss(events: list[tuple[str, bool]], steps: list[Step]) -> None:
    losses, found = Losses(), []
    for reason, has_tokens in events:
        losses, step = losses.after(reason, terminating=False, has_tokens=has_tokens)
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
def test_next_trial_is_assigned_to_a_replica(trials: Trials, found: list[Place], chosen: str | None) -> None:
    started = trials.start(found)
    assert (None if started is None else started[2]) == chosen
    if started is not None:
        after, request, _ = started
        assert request == trials.waiting[0] and after.waiting == trials.waiting[1:]


STREAMS = Trials(streams=(7, 8))


@pytest.mark.parametrize(
    ("trials", "found", "chosen"),
    [
        (STREAMS, places("a"), "a"),
        # The place that streams have already gets more of them while it has room.
        (Trials(streams=(8,), resuming={"a": frozenset({7})}), [Place("a", room=1), Place("b")], "a"),
        (Trials(streams=(8,), resuming={"a": frozenset({7})}), [Place("a"), Place("b", room=9)], None),
        (Trials(streams=(8,), resuming={"a": frozenset({7})}), [Place("a"), *places("b", "c", "d")], "b"),
        # Trials alone and together exclude each other.
        (Trials((1,), resuming={"a": frozenset({7})}), [Place("a", room=9)], None),
        (Trials(streams=(8,), running={"a": 1}), [Place("a", room=9)], None),
        # A request that is tried alone does not wait for streams without a place.
        (Trials((1,), {}, (8,), {"a": frozenset({7})}), [Place("a"), *places("b", "c", "d")], "b"),
    ],
)
def test_next_stream_is_assigned_to_a_replica(trials: Trials, found: list[Place], chosen: str | None) -> None:
    started = trials.start(found)
    assert (None if started is None else started[2]) == chosen


@pytest.mark.parametrize(
    ("found", "chosen"),
    [
        ([Place("s", track=STABLE), Place("c", in_flight=5, track=CANARY)], "c"),
        ([Place("s", track=STABLE), Place("c", is_suspect=True, track=CANARY)], "s"),
        ([Place("s", track=STABLE)], "s"),
        # It waits for its own track while a replica of it lives.
        ([Place("s", track=STABLE), Place("c", is_refusing=True, track=CANARY)], None),
    ],
)
@pytest.mark.parametrize("trials", [Trials(streams=(1,)), Trials(waiting=(1,))], ids=["together", "alone"])
def test_lost_request_stays_on_its_track(trials: Trials, found: list[Place], chosen: str | None) -> None:
    started = trials.start(found, tracks={1: CANARY})
    assert (None if started is None else started[2]) == chosen


def test_replica_that_cannot_continue_a_stream_gets_another_one() -> None:
    trials, unsuited = Trials(streams=(1, 2, 3)), {1: frozenset({"a"}), 2: frozenset({"a"})}
    found = [Place("a", in_flight=1, room=9), Place("b", in_flight=2, room=9)]
    started = trials.start(found, unsuited=unsuited)
    assert started is not None and started[1:] == (1, "b")
    started = trials.start(places("a"), unsuited=unsuited)
    assert started is not None and started[1:] == (3, "a")
    assert Trials(streams=(1, 2)).start(places("a"), unsuited=unsuited) is None


def test_failed_replica_is_used_only_if_all_failed() -> None:
    failed, trusted = Place("a", is_suspect=True), Place("b", in_flight=9)
    for found, chosen in (([failed], "a"), ([failed, trusted], "b")):
        started = WAITING.start(found, ask_suspect=True)
        assert started is not None and started[2] == chosen


def test_refused_trial_is_retried_first() -> None:
    started = WAITING.start(places("a"))
    assert started is not None
    assert started[0].put_back(1) == WAITING


@pytest.mark.parametrize(
    ("trials", "replicas", "avoided"),
    [({"a": 1}, ["a", "b"], {"a"}), ({"a": 1}, ["a"], set()), ({}, ["a"], set()), ({"gone": 1}, ["a"], set())],
)
def test_other_requests_avoid_a_trial(trials: dict[str, int], replicas: list[str], avoided: set[str]) -> None:
    assert avoid(trials, replicas) == avoided


EVENTS = ["enter", "enter stream", "start", "end", "put_back", "put_back stream", "leave"]


@given(st.lists(st.tuples(st.sampled_from(EVENTS), st.integers(0, 5))))
def test_each_request_waits_or_runs_exactly_once(events: list[tuple[str, int]]) -> None:
    """A request waits once or runs once, and no replica has a trial alone with another one."""
    trials, known = Trials(), set[int]()
    found = [Place(name, room=2) for name in "abcd"]
    for event, request in events:
        running = [*trials.running.values(), *(each for members in trials.resuming.values() for each in members)]
        if event.startswith("enter") and request not in known:
            trials, known = trials.enter(request, together=event.endswith("stream")), known | {request}
        elif event == "start" and (started := trials.start(found)) is not None:
            trials = started[0]
        elif event == "end" and request in running:
            trials, known = trials.end(request), known - {request}
        elif event.startswith("put_back") and request in running:
            trials = trials.put_back(request, together=event.endswith("stream"))
        elif event == "leave":
            trials, known = trials.leave(request), known - {request}
        resuming = [each for members in trials.resuming.values() for each in members]
        everywhere = [*trials.waiting, *trials.streams, *trials.running.values(), *resuming]
        assert sorted(everywhere) == sorted(known)
        assert len(trials.places) <= most_trials(len(found))
        assert not trials.running.keys() & trials.resuming.keys()
