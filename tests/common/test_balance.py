"""The choice of a replica for a request, on values."""

from dataclasses import replace

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from quire_common.routing import (
    Candidate,
    Hold,
    Load,
    Picked,
    expected_wait_seconds,
    first_token_seconds,
    pick,
)


def load(
    *,
    running: float = 0,
    waiting: float = 0,
    kv: float = 0,
    rate: float | None = None,
    in_flight: int = 0,
    slots: float | None = None,
    pending: float | None = None,
    speed: float | None = None,
) -> Load:
    return Load(
        running=running,
        waiting=waiting,
        kv_usage=kv,
        finished_per_second=rate,
        in_flight=in_flight,
        max_running=slots,
        pending_tokens=pending,
        prefill_tokens_per_second=speed,
    )


def replica(
    id_: str,
    told: Load | None = None,
    *,
    in_flight: int = 0,
    ready: bool = True,
    suspect: bool = False,
    sent: float = 0.0,
    share: float = 0.0,
    load_seconds: float = 0.0,
) -> Candidate:
    return Candidate(
        id=id_,
        ready=ready,
        suspect=suspect,
        in_flight=in_flight,
        load=told,
        sent_tokens=sent,
        prefix_share=share,
        load_seconds=load_seconds,
    )


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
    "a suspect only if no other replica is left": ([replica("a", suspect=True), replica("b", load(waiting=50))], "b"),
    "a suspect rather than no replica": ([replica("a", ready=False), replica("b", suspect=True)], "b"),
    "an unknown one as if idle": ([replica("a", load(waiting=1)), replica("b")], "b"),
}


@pytest.mark.parametrize(("candidates", "expected"), CASES.values(), ids=CASES.keys())
def test_replica_with_the_least_expected_wait_is_picked(candidates, expected):
    assert pick(candidates) == Picked(expected)
    assert pick(list(reversed(candidates)), tie_breaker=0.99) == Picked(expected)


TOKEN_CASES = {
    "fewer prompt tokens before fewer requests": (
        [
            replica("a", load(running=1, pending=8000, speed=2000)),
            replica("b", load(running=9, pending=500, speed=2000)),
        ],
        "b",
    ),
    "a queue of short prompts before one long prompt": (
        [
            replica("a", load(running=1, pending=9000, speed=2000)),
            replica("b", load(waiting=8, pending=800, speed=2000)),
        ],
        "b",
    ),
    "more tokens where they are computed faster": (
        [replica("a", load(pending=3000, speed=1000)), replica("b", load(pending=5000, speed=4000))],
        "b",
    ),
    "a slow replica, though it has nothing to do": (
        [replica("a", load(speed=100, pending=0)), replica("b", load(pending=1000, speed=2000))],
        "b",
    ),
    "one whose speed is not known is as fast as the others": (
        [replica("a", load(pending=3000, speed=1000)), replica("b", load(pending=2000))],
        "b",
    ),
    "what was sent since the scrape": (
        [replica("a", load(pending=0, speed=2000), sent=4000), replica("b", load(pending=2000, speed=2000))],
        "b",
    ),
    "one that was not scraped has what was sent to it": (
        [replica("a", sent=4000), replica("b", load(pending=2000, speed=2000))],
        "b",
    ),
    "fewest requests among equals": (
        [replica("a", load(pending=0, running=9, speed=2000)), replica("b", load(pending=40, running=4, speed=2000))],
        "b",
    ),
    "a full KV cache means waiting for an end": (
        [replica("a", load(kv=0.97, pending=0, rate=0.5, speed=2000)), replica("b", load(pending=1500, speed=2000))],
        "b",
    ),
    "so does a full batch": (
        [
            replica("a", load(running=64, slots=64, waiting=2, pending=0, rate=1.0, speed=2000)),
            replica("b", load(running=60, slots=64, pending=1500, speed=2000)),
        ],
        "b",
    ),
    "a cached prefix, as long as the way to it is no longer than what it saves": (
        [replica("a", load(pending=0, speed=1000)), replica("b", load(pending=500, speed=1000), share=0.6)],
        "b",
    ),
    "no cached prefix behind a longer queue": (
        [replica("a", load(pending=700, speed=1000), share=0.6), replica("b", load(pending=0, speed=1000))],
        "b",
    ),
    "no cached prefix at a replica that has much more than its share": (
        [
            replica("a", load(running=8, pending=0, speed=1000), share=0.9),
            replica("b", load(running=1, pending=0, speed=1000)),
        ],
        "b",
    ),
    "the adapter, as long as the way to it is no longer than its loading": (
        [replica("a", load(pending=0, speed=1000), load_seconds=5.0), replica("b", load(pending=4000, speed=1000))],
        "b",
    ),
    "no adapter behind a longer queue": (
        [replica("a", load(pending=6000, speed=1000)), replica("b", load(pending=0, speed=1000), load_seconds=5.0)],
        "b",
    ),
    "requests alone where one does not tell its tokens": (
        [replica("a", load(waiting=3, pending=0, speed=1000)), replica("b", load(waiting=1))],
        "b",
    ),
}


@pytest.mark.parametrize(("candidates", "expected"), TOKEN_CASES.values(), ids=TOKEN_CASES.keys())
def test_replica_with_the_lowest_expected_ttft_is_picked(candidates, expected):
    assert pick(candidates, prompt_tokens=1000) == Picked(expected)
    assert pick(list(reversed(candidates)), prompt_tokens=1000, tie_breaker=0.99) == Picked(expected)


def test_without_reported_tokens_the_prompt_length_is_ignored():
    fleet = [replica("a", load(running=9), sent=0), replica("b", load(running=4), sent=50_000)]
    assert pick(fleet, prompt_tokens=10) == pick(fleet, prompt_tokens=100_000) == Picked("b")


def test_request_is_held_if_no_replica_is_ready():
    assert pick([]) == Hold()
    assert pick([replica("a", ready=False)]) == Hold()
    assert pick([replica("a")], exclude={"a"}) == Hold()


def test_tie_breaker_chooses_among_equal_replicas():
    equals = [replica(name, load(running=3)) for name in "abcd"]
    assert [pick(equals, tie_breaker=tie_breaker).id for tie_breaker in (0.0, 0.3, 0.6, 0.99)] == ["a", "b", "c", "d"]


loads = st.none() | st.builds(
    load,
    running=st.integers(0, 300),
    waiting=st.integers(0, 300),
    kv=st.floats(0, 1),
    rate=st.none() | st.floats(0, 100),
    in_flight=st.integers(0, 300),
    slots=st.none() | st.integers(1, 300),
    pending=st.none() | st.floats(0, 1e7),
    speed=st.none() | st.floats(0.1, 1e6),
)
tokens = st.floats(0, 1e6)
fleets = st.lists(
    st.builds(
        replica,
        st.uuids().map(str),
        loads,
        in_flight=st.integers(0, 300),
        ready=st.booleans(),
        suspect=st.booleans(),
        sent=tokens,
        share=st.floats(0, 1),
    ),
    max_size=8,
    unique_by=lambda candidate: candidate.id,
)


@given(fleets, tokens, st.floats(0, 1, exclude_max=True), st.data())
def test_ready_replica_is_picked_if_there_is_one(fleet, prompt, tie_breaker, data):
    exclude = set(data.draw(st.lists(st.sampled_from([c.id for c in fleet])))) if fleet else set()
    able = {c.id for c in fleet if c.ready and c.id not in exclude}
    choice = pick(fleet, prompt_tokens=prompt, exclude=exclude, tie_breaker=tie_breaker)
    assert (choice == Hold()) if not able else (isinstance(choice, Picked) and choice.id in able)


@given(loads.filter(bool), st.integers(1, 50))
def test_more_waiting_requests_never_shorten_the_wait(told, more):
    longer = load(
        running=told.running,
        waiting=told.waiting + more,
        kv=told.kv_usage,
        rate=told.finished_per_second,
        in_flight=told.in_flight,
    )
    assert expected_wait_seconds(replica("a", longer)) >= expected_wait_seconds(replica("a", told))


telling = st.builds(
    load,
    running=st.integers(0, 30),
    waiting=st.integers(0, 30),
    kv=st.floats(0, 1),
    rate=st.none() | st.floats(0, 100),
    in_flight=st.integers(0, 30),
    slots=st.none() | st.integers(1, 30),
    pending=st.floats(0, 1e6),
    speed=st.none() | st.floats(100, 1e5),
)
telling_fleets = st.lists(
    st.builds(
        replica,
        st.uuids().map(str),
        st.none() | telling,
        in_flight=st.integers(0, 60),
        sent=tokens,
        share=st.floats(0, 1),
    ),
    min_size=2,
    max_size=6,
    unique_by=lambda candidate: candidate.id,
)


@given(telling_fleets, tokens, st.integers(0, 5), st.floats(1, 1e6), st.sampled_from(["pending", "sent", "running"]))
def test_more_load_never_attracts_a_request(fleet, prompt, place, more, of):
    """A replica that was not picked is still not picked with more prompt tokens or more requests."""
    busier = fleet[place % len(fleet)]
    chosen = pick(fleet, prompt_tokens=prompt)
    assume(chosen != Picked(busier.id))
    if of == "sent":
        changed = busier._replace(sent_tokens=busier.sent_tokens + more)
    else:
        assume(busier.load is not None)
        name = "pending_tokens" if of == "pending" else "running"
        changed = busier._replace(load=replace(busier.load, **{name: getattr(busier.load, name) + more}))
    assert pick([changed if c is busier else c for c in fleet], prompt_tokens=prompt) != Picked(busier.id)


@given(telling, st.floats(0, 1e6), st.floats(0, 1e6), st.floats(1, 1e5))
def test_more_uncached_tokens_never_lower_the_ttft(told, fewer, more, typical):
    here = replica("a", told)
    sooner, later = (first_token_seconds(here, own_tokens=own, typical_rate=typical) for own in (fewer, fewer + more))
    assert 0 <= sooner <= later
