"""Which replica a request goes to, as values."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire_gateway.balance import Candidate, Hold, Load, Picked, expected_wait_seconds, pick


def load(
    *, running: float = 0, waiting: float = 0, kv: float = 0, rate: float | None = None, in_flight: int = 0
) -> Load:
    return Load(running=running, waiting=waiting, kv_usage=kv, finished_per_second=rate, in_flight=in_flight)


def replica(
    id_: str, told: Load | None = None, *, in_flight: int = 0, ready: bool = True, suspect: bool = False
) -> Candidate:
    return Candidate(id=id_, ready=ready, suspect=suspect, in_flight=in_flight, load=told)


CASES = {
    "fewest of our own when nothing is known": ([replica("a", in_flight=2), replica("b", in_flight=1)], "b"),
    "shorter queue": ([replica("a", load(waiting=3)), replica("b", load(waiting=1))], "b"),
    "no queue before few running": ([replica("a", load(running=2, waiting=2)), replica("b", load(running=60))], "b"),
    "fewer running": ([replica("a", load(running=9)), replica("b", load(running=4))], "b"),
    "a full KV cache means waiting": ([replica("a", load(running=1, kv=0.99)), replica("b", load(running=40))], "b"),
    "a longer queue that moves faster": (
        [replica("a", load(waiting=4, rate=0.5)), replica("b", load(waiting=6, rate=5.0))],
        "b",
    ),
    "what was sent since the scrape": (
        [
            replica("a", load(running=1, in_flight=1), in_flight=8),
            replica("b", load(running=4, in_flight=4), in_flight=4),
        ],
        "b",
    ),
    "what ended since the scrape counts as nothing": (
        [replica("a", load(running=9, in_flight=9), in_flight=0), replica("b", load(running=4))],
        "b",
    ),
    "a suspect only when nobody else is left": ([replica("a", suspect=True), replica("b", load(waiting=50))], "b"),
    "a suspect rather than nobody": ([replica("a", ready=False), replica("b", suspect=True)], "b"),
    "an unknown one as if idle": ([replica("a", load(waiting=1)), replica("b")], "b"),
}


@pytest.mark.parametrize(("candidates", "expected"), CASES.values(), ids=CASES.keys())
def test_picks_the_least_expected_wait(candidates, expected):
    assert pick(candidates) == Picked(expected)
    assert pick(list(reversed(candidates)), draw=0.99) == Picked(expected)


def test_nobody_ready_means_hold():
    assert pick([]) == Hold()
    assert pick([replica("a", ready=False)]) == Hold()
    assert pick([replica("a")], exclude={"a"}) == Hold()


def test_equals_are_told_apart_by_the_draw():
    equals = [replica(name, load(running=3)) for name in "abcd"]
    assert [pick(equals, draw=draw).id for draw in (0.0, 0.3, 0.6, 0.99)] == ["a", "b", "c", "d"]


loads = st.none() | st.builds(
    load,
    running=st.integers(0, 300),
    waiting=st.integers(0, 300),
    kv=st.floats(0, 1),
    rate=st.none() | st.floats(0, 100),
    in_flight=st.integers(0, 300),
)
fleets = st.lists(
    st.builds(
        replica, st.uuids().map(str), loads, in_flight=st.integers(0, 300), ready=st.booleans(), suspect=st.booleans()
    ),
    max_size=8,
    unique_by=lambda candidate: candidate.id,
)


@given(fleets, st.floats(0, 1, exclude_max=True), st.data())
def test_picked_replica_is_ready_and_not_excluded_and_there_is_one_whenever_there_can_be(fleet, draw, data):
    exclude = set(data.draw(st.lists(st.sampled_from([c.id for c in fleet])))) if fleet else set()
    able = {c.id for c in fleet if c.ready and c.id not in exclude}
    choice = pick(fleet, exclude=exclude, draw=draw)
    assert (choice == Hold()) if not able else (isinstance(choice, Picked) and choice.id in able)


@given(loads.filter(bool), st.integers(1, 50))
def test_more_waiting_never_means_less_wait(told, more):
    longer = load(
        running=told.running,
        waiting=told.waiting + more,
        kv=told.kv_usage,
        rate=told.finished_per_second,
        in_flight=told.in_flight,
    )
    assert expected_wait_seconds(replica("a", longer)) >= expected_wait_seconds(replica("a", told))
