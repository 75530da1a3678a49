"""The start-up time of replicas, the rise of the work in that time, and the headroom for it."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire_operator.autoscaling.demand import Tuning
from quire_operator.autoscaling.history import MAX_SECONDS, USUAL_SECONDS, ScalingRecord, StartUps
from quire_operator.autoscaling.observation import ReplicaObservation, ReplicaPhase
from quire_operator.autoscaling.ramp import RampEstimator

PHASES = {
    "P": ReplicaPhase.PENDING,
    "L": ReplicaPhase.LOADING,
    "R": ReplicaPhase.READY,
    "D": ReplicaPhase.DRAINING,
    ".": None,
}


def watched(*lives: str, every: float = 15.0) -> StartUps:
    """Return the start-ups of replicas whose phases are given tick by tick, a letter each; a dot means none."""
    seen = StartUps()
    for look in range(max(map(len, lives))):
        there = [
            ReplicaObservation(name=f"r{number}", phase=phase)
            for number, life in enumerate(lives)
            if look < len(life) and (phase := PHASES[life[look]]) is not None
        ]
        seen = seen.seen(there, is_first=look == 0, now=1000.0 + every * look)
    return seen


# --- how long replicas take ---


@pytest.mark.parametrize(
    ("life", "seconds"),
    [
        (".PLLLR", (60.0,)),
        (".LR", (15.0,)),
        (".PR", (15.0,)),
        # Found starting, or ready, at the first tick: its start is unknown.
        ("PLLLR", ()),
        ("LLLLLLLR", ()),
        ("RRRR", ()),
        # It appears without a start-up.
        (".RRR", ()),
        # It never becomes ready.
        (".PPPPPPPPPPPPPPPPPPPP", ()),
        (".PPP....", ()),
        (".PLLD", ()),
        # Its engine died, or one probe failed: that is not a requested replica.
        (".PLRRLR", (30.0,)),
        ("RRLLLR", ()),
        # Another one with the same name, after the first was deleted.
        (".PLR..PLLLR", (30.0, 60.0)),
        ("PP..PLR", (30.0,)),
    ],
)
def test_start_up_is_the_time_from_first_seen_to_ready(life: str, seconds: tuple[float, ...]):
    seen = watched(life)
    assert seen.seconds == seconds
    assert (seen.learnt is None) == (not seconds)


def test_simultaneous_starts_are_counted_and_the_last_few_kept():
    assert watched(".PLR", ".PLLR", ".PLLLR").seconds == (30.0, 45.0, 60.0)
    many = watched(*(["." + "L" * 4 + "R"] * 3), *(["." + "L" * 8 + "R"] * 5))
    assert many.seconds == (120.0,) * 5


@pytest.mark.parametrize(
    ("seconds", "usual"),
    [
        ((), USUAL_SECONDS),
        ((30.0,), 30.0),
        ((30.0, 400.0), 30.0),
        ((400.0, 30.0), 30.0),
        ((30.0, 40.0, 1800.0), 40.0),
        ((30.0, 40.0, 30.0, 1800.0, 35.0), 40.0),
        ((420.0, 410.0, 30.0, 430.0, 400.0), 420.0),
    ],
)
def test_slow_starts_are_weighted_by_their_length(seconds: tuple[float, ...], usual: float):
    assert StartUps(seconds=seconds).usual == usual


def test_stored_start_up_is_kept_until_one_is_observed():
    before = StartUps(before=400.0)
    assert (before.usual, before.learnt) == (400.0, 400.0)
    assert StartUps(before=400.0, seconds=(30.0,)).usual == 30.0
    assert StartUps(before=60.0, seconds=(1800.0,)).usual == 60.0, "one that waited for a machine says nothing"
    assert StartUps(before=10.0**9).usual == MAX_SECONDS, "a user may have written any number to status"
    assert (StartUps().usual, StartUps().learnt) == (USUAL_SECONDS, None)


def test_start_up_of_a_day_counts_as_half_an_hour():
    assert watched(".P" + "L" * 200 + "R", every=600.0).seconds == (MAX_SECONDS,)


looks = st.lists(
    st.tuples(
        st.lists(st.tuples(st.sampled_from("abcd"), st.sampled_from(ReplicaPhase)), max_size=4),
        st.booleans(),
        st.floats(-1e6, 1e9),
    ),
    max_size=30,
)


@given(looks)
def test_start_ups_are_positive_and_bounded_for_any_clock(looks):
    seen = StartUps()
    for there, is_first, now in looks:
        replicas = [ReplicaObservation(name=name, phase=phase) for name, phase in dict(there).items()]
        seen = seen.seen(replicas, is_first=is_first, now=now)
        assert seen.since.keys() == dict(there).keys()
    assert all(0 < seconds <= MAX_SECONDS for seconds in (*seen.seconds, seen.usual))
    assert len(seen.seconds) <= 5


# --- the rise of the work in that time ---


def risen(*works: float, start_up: float, window: float = 300.0) -> RampEstimator:
    """Return the estimator after these ticks of work, 15 s apart."""
    ramp = RampEstimator()
    for look, busy in enumerate(works):
        ramp = ramp.seen(busy, seconds=15.0, start_up=start_up, window=window, now=15.0 * look)
    return ramp


def test_unobserved_ramps_grow_like_a_random_walk():
    usual = RampEstimator().deviation(1.0, start_up=105.0)
    assert usual > 0
    assert RampEstimator().deviation(4.0, start_up=105.0) == pytest.approx(2 * usual)
    assert RampEstimator().deviation(1.0, start_up=465.0) == pytest.approx(2 * usual)
    assert RampEstimator().deviation(0.0, start_up=465.0) == 0.0


def test_ramp_is_larger_for_longer_start_ups():
    morning = [look / 20 for look in range(120)]
    after = {start_up: risen(*morning, start_up=start_up) for start_up in (30.0, 120.0, 420.0)}
    measured = [math.sqrt(ramp.squares / ramp.seconds) for ramp in after.values()]
    # By 0.05 per tick, over the start-up and the tick after it.
    assert measured == pytest.approx([0.15, 0.45, 1.45], rel=0.01)


@pytest.mark.parametrize("start_up", [30.0, 120.0, 420.0])
def test_repeated_bursts_within_the_window_are_no_ramp(start_up: float):
    bursts = risen(*([0.0] * 15 + [8.0] * 4) * 12, start_up=start_up, window=300.0)
    steady = risen(*[8.0] * 228, start_up=start_up, window=300.0)
    first = 8.0**2 * 15.0 * (start_up / 15.0 + 2)
    assert bursts.squares < first, "the first one was not observed"
    assert steady.squares == 0.0
    fewer = risen(*([0.0] * 60 + [8.0] * 4) * 4, start_up=start_up, window=300.0)
    assert fewer.squares > bursts.squares


def test_falling_load_is_no_ramp_and_ramps_decay():
    assert risen(*[9 - look / 20 for look in range(120)], start_up=120.0).squares == 0.0
    ramp, seen = risen(*[look / 20 for look in range(120)], start_up=120.0), []
    for look in range(400):
        ramp = ramp.seen(6.0, seconds=15.0, start_up=120.0, window=300.0, now=1800.0 + 15.0 * look)
        seen.append(ramp.deviation(6.0, start_up=120.0))
    assert seen[-1] < 0.75 * seen[0]


def test_no_ramp_is_estimated_before_one_start_up_time():
    assert risen(*range(9), start_up=120.0).seconds == 0.0
    assert risen(*range(11), start_up=120.0).seconds > 0.0


@given(
    st.lists(st.tuples(st.floats(0, 48), st.floats(0.1, 120), st.floats(15, MAX_SECONDS)), max_size=60),
    st.floats(0, 3600),
)
def test_ramp_is_finite_and_its_history_is_bounded(looks, window):
    ramp, now, highest = RampEstimator(), 0.0, 0.0
    for busy, seconds, start_up in looks:
        now += seconds
        highest = max(highest, busy)
        ramp = ramp.seen(busy, seconds=seconds, start_up=start_up, window=window, now=now)
        assert ramp.levels[-1].busy == busy
        assert all(level.time >= now - start_up - window - 15.0 for level in ramp.levels)
        measured = math.sqrt(ramp.squares / ramp.seconds) if ramp.seconds else 0.0
        assert 0.0 <= measured <= highest + 1e-6
        assert math.isfinite(ramp.deviation(busy, start_up=start_up))


@given(st.floats(0, 50), st.floats(0, 50), st.floats(0, 50))
def test_spare_replicas_grow_with_variance_and_ramp(deviation, rise, more):
    spare = Tuning().spare_replicas(deviation, rise, percentile=95)
    assert spare >= 0
    assert Tuning().spare_replicas(deviation + more, rise, percentile=95) >= spare
    assert Tuning().spare_replicas(deviation, rise + more, percentile=95) >= spare
    assert Tuning().spare_replicas(deviation, rise, percentile=99) >= spare
    # Both are rarely at their maximum together.
    alone = Tuning().spare_replicas(deviation, 0.0, percentile=95) + Tuning().spare_replicas(0.0, rise, percentile=95)
    assert spare <= alone + 1e-9


# --- the effect on the policy ---


class Fleet:
    """Replicas that take ``looks`` ticks to start, all busy with requests of 200 prompt and 50 output tokens."""

    def __init__(self, kit, *, looks: int) -> None:
        self.kit, self.looks, self.number = kit, looks, 0
        self.story = kit.story(current=1, max_sequences=4, max_replicas=40)
        self.born: dict[str, int] = {"r0": -looks}
        self.served: dict[str, float] = {"r0": 0.0}

    def tick(self, requests: float):
        up = [name for name, born in self.born.items() if self.number - born >= self.looks]
        for name in up:
            self.served[name] += requests / len(up)
        seen = [
            self.kit.ready(name, running=1, **counters(self.served[name])) if name in up else self.kit.loading(name)
            for name in self.born
        ]
        decision = self.story.tick(*seen)
        self.number += 1
        for number in range(len(self.born), decision.desired):
            self.born[f"r{number}"], self.served[f"r{number}"] = self.number, 0.0
        return decision


def counters(requests: float) -> dict[str, float]:
    prompt, generated = requests * 200.0, requests * 50.0
    return {
        "arrived_requests": requests,
        "arrived_prompt_tokens": prompt,
        "prompt_tokens": prompt,
        "generation_tokens": generated,
        "finished_requests": requests,
        "steps": generated / 4,
        "busy_seconds": 0.02 * generated / 4 + 0.0005 * prompt + 0.0008 * generated,
    }


MORNING = [20.0] * 10 + [20.0 + 4.0 * look for look in range(60)]


def test_slower_starts_keep_more_spare_replicas(kit):
    needs, details = [], []
    for looks in (2, 8, 28):
        fleet = Fleet(kit, looks=looks)
        last = [fleet.tick(requests) for requests in MORNING][-1]
        needs.append(last.inputs["needArrivingWork"])
        details.append(next(term.detail for term in last.terms if term.reason.value == "ArrivingWork"))
        assert last.inputs["startUpSeconds"] == looks * 15
    assert needs[0] < needs[1] < needs[2]
    for looks, detail in zip((2, 8, 28), details, strict=True):
        assert f"over {looks * 15} s start-up" in detail


def test_start_up_time_survives_restarts_and_is_rarely_written(kit):
    fleet = Fleet(kit, looks=28)
    records = set()
    for requests in MORNING:
        fleet.tick(requests)
        records.add(fleet.story.history.record.start_up_seconds)
    assert records == {None, 420}
    fleet.story.restart()
    decision = [fleet.tick(100.0) for _ in range(4)][-1]
    assert decision.inputs["startUpSeconds"] == 420


def test_start_ups_are_measured_without_metrics(kit):
    story = kit.story(current=2)
    story.tick(kit.ready("a", age=None))
    story.ticks(6, kit.ready("a", age=None), kit.loading("b"))
    decision = story.tick(kit.ready("a", age=None), kit.ready("b", age=None))
    assert decision.inputs["startUpSeconds"] == 90


def test_gap_between_ticks_is_not_counted_as_start_up(kit):
    story = kit.story(current=2)
    story.tick(kit.ready("a"))
    story.tick(kit.ready("a"), kit.loading("b"))
    decision = story.tick(kit.ready("a"), kit.ready("b"), after=600.0)
    assert story.history.start_ups.seconds == ()
    assert decision.inputs["startUpSeconds"] == USUAL_SECONDS


def test_record_changes_a_start_up_only_by_a_tenth_or_more():
    record = ScalingRecord().with_start_up(None)
    assert record.start_up_seconds is None
    record = record.with_start_up(119.6)
    assert record.start_up_seconds == 120
    assert record.with_start_up(129.0) is record
    assert record.with_start_up(180.0).start_up_seconds == 180
    assert record.with_start_up(None) is record
    assert ScalingRecord().with_start_up(0.2).start_up_seconds == 1
