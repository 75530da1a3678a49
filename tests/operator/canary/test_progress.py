"""The state machine of a canary: each transition, and what holds after any sequence of situations."""

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire_operator.api import Canary, CanaryStep, Gate, GateMetric, OnFailure, OnInconclusive
from quire_operator.canary.analysis import Figures, GateResult, Verdict
from quire_operator.canary.progress import HAS_CANARY, Phase, Record, Situation, advance, read, section, with_gates

STEPS = tuple(CanaryStep(weight_percent=weight, duration_seconds=60.0) for weight in (20, 50))
POLICY = Canary(steps=STEPS, min_requests=100)
PAUSING = replace(POLICY, on_failure=OnFailure.PAUSE)
T = 1_000_000.0


def result(verdict: Verdict) -> GateResult:
    return GateResult(
        gate=Gate(metric=GateMetric.ERROR_RATE),
        verdict=verdict,
        message=verdict.value,
        stable=Figures(count=1),
        canary=Figures(count=1),
    )


def seen(revision: str = "b", **fields: Any) -> Situation:
    verdict = fields.pop("verdict", Verdict.WAITING)
    defaults: dict[str, Any] = {"differs": revision != "a", "canary_ready": True, "requests": 500}
    return Situation(revision=revision, **{**defaults, "results": [result(verdict)], **fields})


STABLE = Record(stable="a")
STARTING = Record(stable="a", phase=Phase.STARTING, canary="b", started=T, step_started=T)
FIRST = replace(STARTING, phase=Phase.CANARY, weight_percent=20)
LAST = replace(FIRST, step=1, weight_percent=50)
PROMOTING = replace(LAST, phase=Phase.PROMOTING, stable="b")
ROLLED_BACK = Record(stable="a", phase=Phase.ROLLED_BACK, rejected="b")
PAUSED = Record(stable="a", phase=Phase.PAUSED, canary="b", rejected="b")


@pytest.mark.parametrize(
    ("before", "situation", "policy", "expected"),
    [
        # (phase, stable, canary, rejected, step, weight) after 70 s
        (None, seen("a"), POLICY, (Phase.STABLE, "a", "", "", 0, 0)),
        (None, seen("b"), POLICY, (Phase.STABLE, "b", "", "", 0, 0)),
        (STABLE, seen("a"), POLICY, (Phase.STABLE, "a", "", "", 0, 0)),
        (STABLE, seen("b", differs=False), POLICY, (Phase.STABLE, "b", "", "", 0, 0)),
        (STABLE, seen("b"), POLICY, (Phase.STARTING, "a", "b", "", 0, 0)),
        (STABLE, seen("b", is_paused=True), POLICY, (Phase.STABLE, "a", "", "", 0, 0)),
        (STARTING, seen(canary_ready=False), POLICY, (Phase.STARTING, "a", "b", "", 0, 0)),
        (STARTING, seen(is_paused=True), POLICY, (Phase.STARTING, "a", "b", "", 0, 0)),
        (STARTING, seen(), POLICY, (Phase.CANARY, "a", "b", "", 0, 20)),
        (STARTING, seen(failure="broken"), POLICY, (Phase.ROLLED_BACK, "a", "", "b", 0, 0)),
        (STARTING, seen("a"), POLICY, (Phase.STABLE, "a", "", "", 0, 0)),
        (FIRST, seen(), POLICY, (Phase.CANARY, "a", "b", "", 1, 20)),
        (FIRST, seen(requests=99), POLICY, (Phase.CANARY, "a", "b", "", 0, 20)),
        (FIRST, seen(results=None), POLICY, (Phase.CANARY, "a", "b", "", 0, 20)),
        (FIRST, seen(is_paused=True), POLICY, (Phase.CANARY, "a", "b", "", 0, 20)),
        (FIRST, seen(verdict=Verdict.FAILED), POLICY, (Phase.ROLLED_BACK, "a", "", "b", 0, 0)),
        (FIRST, seen(verdict=Verdict.FAILED), PAUSING, (Phase.PAUSED, "a", "b", "b", 0, 0)),
        (FIRST, seen(verdict=Verdict.FAILED, is_paused=True), POLICY, (Phase.ROLLED_BACK, "a", "", "b", 0, 0)),
        (FIRST, seen(failure="broken"), POLICY, (Phase.ROLLED_BACK, "a", "", "b", 0, 0)),
        (FIRST, seen("c"), POLICY, (Phase.STARTING, "a", "c", "", 0, 0)),
        (FIRST, seen("a"), POLICY, (Phase.STABLE, "a", "", "", 0, 0)),
        (replace(FIRST, step=1), seen(canary_ready=False), POLICY, (Phase.CANARY, "a", "b", "", 1, 20)),
        (replace(FIRST, step=1), seen(), POLICY, (Phase.CANARY, "a", "b", "", 1, 50)),
        (LAST, seen(), POLICY, (Phase.CANARY, "a", "b", "", 1, 50)),
        (LAST, seen(verdict=Verdict.PASSED), POLICY, (Phase.PROMOTING, "b", "b", "", 1, 50)),
        (LAST, seen(verdict=Verdict.NO_DATA), POLICY, (Phase.PROMOTING, "b", "b", "", 1, 50)),
        (LAST, seen(verdict=Verdict.PASSED, requests=99), POLICY, (Phase.CANARY, "a", "b", "", 1, 50)),
        (PROMOTING, seen(differs=False), POLICY, (Phase.PROMOTING, "b", "b", "", 1, 50)),
        (PROMOTING, seen(differs=False, is_promoted=True), POLICY, (Phase.STABLE, "b", "", "", 0, 0)),
        (PROMOTING, seen("c"), POLICY, (Phase.STARTING, "b", "c", "", 0, 0)),
        (ROLLED_BACK, seen(), POLICY, (Phase.ROLLED_BACK, "a", "", "b", 0, 0)),
        (ROLLED_BACK, seen("a"), POLICY, (Phase.STABLE, "a", "", "b", 0, 0)),
        (ROLLED_BACK, seen("c"), POLICY, (Phase.STARTING, "a", "c", "b", 0, 0)),
        (replace(STABLE, rejected="b"), seen("b"), POLICY, (Phase.ROLLED_BACK, "a", "", "b", 0, 0)),
        (PAUSED, seen(), PAUSING, (Phase.PAUSED, "a", "b", "b", 0, 0)),
        (PAUSED, seen("a"), PAUSING, (Phase.STABLE, "a", "", "b", 0, 0)),
        (PAUSED, seen("c"), PAUSING, (Phase.STARTING, "a", "c", "b", 0, 0)),
    ],
)
def test_transition(before: Record | None, situation: Situation, policy: Canary, expected: tuple[object, ...]) -> None:
    after = advance(before, situation, policy, now=T + 70)
    found = (after.phase, after.stable, after.canary, after.rejected, after.step, after.weight_percent)
    assert found == expected


ESTIMATE, FAIL, PASS = OnInconclusive


@pytest.mark.parametrize(
    ("rule", "leaning", "requests", "expected"),
    [
        (ESTIMATE, Verdict.PASSED, 4000, Phase.PROMOTING),
        (ESTIMATE, Verdict.FAILED, 4000, Phase.ROLLED_BACK),
        (ESTIMATE, None, 4000, Phase.ROLLED_BACK),
        (PASS, Verdict.FAILED, 4000, Phase.PROMOTING),
        (FAIL, Verdict.PASSED, 4000, Phase.ROLLED_BACK),
        (FAIL, Verdict.PASSED, 3999, Phase.CANARY),
        (PASS, None, 3999, Phase.CANARY),
    ],
)
def test_uncertain_gate_is_decided_after_max_requests(
    rule: OnInconclusive, leaning: Verdict | None, requests: int, expected: Phase
) -> None:
    policy = replace(POLICY, on_inconclusive=rule)
    results = [replace(result(Verdict.WAITING), leaning=leaning), result(Verdict.PASSED)]
    after = advance(LAST, seen(results=results, requests=requests), policy, now=T + 70)
    assert after.phase is expected
    assert ("maxRequests 4000" in after.message) == (expected is not Phase.CANARY)
    earlier = advance(FIRST, seen(results=results, requests=requests), policy, now=T + 70)
    assert (earlier.phase, earlier.step) == (Phase.CANARY, 1), "only the last step is bounded"
    assert advance(LAST, seen(results=results, requests=requests), policy, now=T + 59).phase is Phase.CANARY


def test_step_lasts_its_duration() -> None:
    assert advance(FIRST, seen(), POLICY, now=T + 59).step == 0
    assert advance(LAST, seen(verdict=Verdict.PASSED), POLICY, now=T + 59).phase is Phase.CANARY


def test_a_pause_does_not_count_and_changes_the_record_seldom() -> None:
    record, changes = FIRST, 0
    for second in range(600):
        after = advance(record, seen(is_paused=True), POLICY, now=T + second)
        changes, record = changes + (after != record), after
    assert changes <= 600 / 15 + 1
    assert advance(record, seen(), POLICY, now=T + 600 + 59 - 15).step == 0
    assert advance(record, seen(), POLICY, now=T + 600 + 60).step == 1


def test_message_estimates_the_time_until_a_verdict() -> None:
    record = advance(FIRST, seen(requests=50), POLICY, now=T + 600)
    assert record.message == "step 1 of 2 (20 %): 50 requests, about 50 more for a verdict: 10m"
    last = advance(LAST, seen(requests=200), POLICY, now=T + 600)
    assert "ErrorRate: Waiting" in last.message


def test_share_is_lowered_to_equal_load_and_follows_the_replicas() -> None:
    started = advance(STARTING, seen(replicas=4), POLICY, now=T)
    assert started.weight_percent == 20
    last = advance(replace(FIRST, step=1), seen(replicas=4), POLICY, now=T + 70)
    assert (last.weight_percent, last.step_started) == (33, T + 70)
    fewer = advance(last, seen(replicas=5, canary_ready=False), POLICY, now=T + 80)
    assert (fewer.weight_percent, fewer.step_started) == (33, T + 70)
    assert advance(last, seen(replicas=5), POLICY, now=T + 80).weight_percent == 38


def test_shortened_list_of_steps_is_accepted() -> None:
    one = replace(POLICY, steps=STEPS[:1])
    after = advance(LAST, seen(verdict=Verdict.PASSED), one, now=T + 70)
    assert (after.phase, after.weight_percent) == (Phase.CANARY, 20)


situations = st.builds(
    seen,
    st.sampled_from("abc"),
    verdict=st.sampled_from(Verdict),
    canary_ready=st.booleans(),
    failure=st.one_of(st.none(), st.just("broken")),
    requests=st.integers(0, 1000),
    is_promoted=st.booleans(),
    is_paused=st.booleans(),
    differs=st.booleans(),
)


@given(st.lists(st.tuples(situations, st.floats(1, 600)), max_size=30), st.sampled_from([POLICY, PAUSING]))
def test_record_is_consistent_after_any_sequence(steps: list[tuple[Situation, float]], policy: Canary) -> None:
    record, now = None, T
    for situation, seconds in steps:
        now += seconds
        before, record = record, advance(record, situation, policy, now=now)
        assert (record.phase in HAS_CANARY) == bool(record.canary)
        assert record.weight_percent == 0 or record.phase in (Phase.CANARY, Phase.PROMOTING)
        assert record.weight_percent in (0, 20, 50)
        if before is not None and record.stable != before.stable:
            if situation.differs:
                assert record.phase is Phase.PROMOTING and record.stable == before.canary
                assert all(each.verdict in (Verdict.PASSED, Verdict.NO_DATA) for each in situation.results or ())
            else:
                assert record.phase is Phase.STABLE and record.stable == situation.revision
        if before is not None and record.rejected != before.rejected:
            assert record.rejected == before.canary
        # A record is the same after it was written and read again, but for fractions of seconds.
        again = read({"rollout": section(record, None)})
        assert again is not None
        assert replace(again, started=0, step_started=0) == replace(record, started=0, step_started=0)


def test_figures_stay_after_a_rollback_until_the_next_canary() -> None:
    stored = {"rollout": {**section(FIRST, None), "gates": [{"metric": "ErrorRate"}]}}
    after = section(ROLLED_BACK, None)
    assert with_gates(after, stored, record=ROLLED_BACK)["gates"] == [{"metric": "ErrorRate"}]
    other = replace(STARTING, canary="c")
    assert "gates" not in with_gates(section(other, None), stored, record=other)
