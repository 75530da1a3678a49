"""The definition of a late request, and the score."""

import pytest

from quire_cli.simulation.results import HoldingStep, Outcome, RequestResult, SimulatedRun, is_late

REQUEST = {
    "arrival": 10.0,
    "prompt_tokens": 100,
    "output_tokens": 9,
    "replica": "replica-0",
    "own_prefill_seconds": 1.5,
}


@pytest.mark.parametrize(
    ("first_token", "outcome", "late"),
    [
        (13.5, Outcome.FINISHED, False),
        (13.51, Outcome.FINISHED, True),
        (11.0, Outcome.UNFINISHED, False),
        (None, Outcome.UNFINISHED, True),
        (None, Outcome.FAILED, True),
        (11.0, Outcome.FAILED, True),
    ],
)
def test_a_first_token_is_late_two_seconds_after_its_own_prefill(first_token, outcome, late):
    result = RequestResult(**REQUEST, first_token=first_token, finish=None, outcome=outcome)
    assert is_late(result) is late


def test_objective_is_configurable():
    result = RequestResult(**REQUEST, first_token=12.0, finish=14.0, outcome=Outcome.FINISHED)
    assert is_late(result, slo_seconds=0.25)
    assert not is_late(result, slo_seconds=1.0)


def test_only_requests_after_the_warm_up_are_scored(play):
    run = play((0.0, 3000, 1), (0.0, 3000, 1), (50.0, 100, 1), (100.0, 100, 1), scored_from=40.0).run
    assert [r.arrival for r in run.scored] == [50.0, 100.0]
    assert run.attainment() == 1.0
    assert run.replica_hours == pytest.approx(60.0 / 3600)
    assert run.worst_queue == 0


def test_attainment_is_the_share_within_the_objective(play):
    # The second waits 3.1 s for the first, whose budget of 2,000 it does not get.
    run = play((0.0, 5000, 1), (0.0, 2000, 1), engine={"max_batched_tokens": 2000}).run
    assert [is_late(r) for r in run.requests] == [False, True]
    assert run.attainment() == 0.5


def test_replica_seconds_are_those_within_the_window():
    steps = (HoldingStep(0.0, 1), HoldingStep(10.0, 3), HoldingStep(20.0, 2), HoldingStep(90.0, 0))
    run = SimulatedRun(
        requests=(), decisions=(), timeline=(), holding=steps, scored_from=5.0, scored_until=30.0, worst_queue=0
    )
    assert run.replica_hours * 3600 == pytest.approx(5 * 1 + 10 * 3 + 10 * 2)
