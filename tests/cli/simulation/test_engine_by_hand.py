"""One replica, with times by hand, where tests/contract/test_simulator.py does not compare with the real scheduler."""

import pytest

from quire_cli.simulation.results import Outcome
from quire_cli.simulation.traces import Request


def first_tokens(run):
    return [pytest.approx(r.first_token) for r in run.requests]


def finishes(run):
    return [pytest.approx(r.finish) for r in run.requests]


def test_single_request_takes_prefill_and_decode_steps(play):
    run = play((5.0, 100, 5)).run
    (request,) = run.requests
    assert request.first_token == pytest.approx(5.2)
    assert request.finish == pytest.approx(5.2 + 4 * 0.11)
    assert request.own_prefill_seconds == pytest.approx(0.2)
    assert request.outcome is Outcome.FINISHED and request.replica == "replica-0"


def test_prefill_steps_of_a_single_prompt_stay_below_two_seconds(play):
    """Expect steps of 1,900, 1,900 and 200 tokens, although the token budget has room for one of 4.1 s."""
    run = play((0.0, 4000, 1), engine={"max_batched_tokens": 8000}).run
    assert first_tokens(run) == [3 * 0.1 + 4.0]


def test_decode_steps_take_longer_with_context(play):
    run = play((0.0, 100, 4), engine={"decode_seconds_per_kv_token": 0.001}).run
    steps = [0.1 + 0.01 + 0.001 * tokens for tokens in (100, 101, 102)]
    assert finishes(run) == [0.2 + sum(steps)]


def test_request_larger_than_the_cache_is_refused(play):
    run = play((0.0, 161, 1), (0.0, 160, 1), (0.0, 160, 2), engine={"kv_tokens": 160}).run
    assert [r.outcome for r in run.requests] == [Outcome.FAILED, Outcome.FINISHED, Outcome.FAILED]


def test_prompt_chunks_respect_the_stall_bound_of_decoders(play):
    # Decoding takes 0.11 s, and a little over 0.15 s is allowed: 40 prompt tokens a step.
    run = play((0.0, 100, 100), (0.2, 120, 1), engine={"max_generation_stall_seconds": 0.1505}).run
    assert run.requests[1].first_token == pytest.approx(0.2 + 3 * 0.15)


def test_prompt_gets_a_quarter_of_a_bound_exceeded_by_decoding(play):
    run = play((0.0, 100, 100), (0.2, 60, 1), engine={"max_generation_stall_seconds": 0.08}).run
    assert run.requests[1].first_token == pytest.approx(0.2 + 3 * (0.11 + 0.02))


def test_least_recently_used_prefix_is_evicted_first(play):
    # Room for four blocks of 512: the third prompt evicts the first one's second block.
    prompts = [
        Request(0.0, 1025, 1, (1, 2)),
        Request(10.0, 513, 1, (3,)),
        Request(20.0, 513, 1, (4,)),
        Request(30.0, 1025, 1, (1, 2)),
    ]
    run = play(*prompts, engine={"kv_tokens": 2048}).run
    assert run.requests[3].cached_tokens == 512


def test_shared_tokens_of_running_sequences_are_stored_once(play):
    script_prompts = [Request(0.0, 1025, 50, (1, 2)), Request(2.0, 1025, 50, (1, 2))]
    story = play(*script_prompts, timeline_seconds=1.0)
    shared = next(p for p in story.run.timeline if p.running == 2 and p.time >= 3.0)
    # 1,024 shared tokens and two to eight blocks of their own.
    assert 64 + 2 <= shared.kv_usage * 1000 <= 64 + 8


def test_too_long_prompt_is_refused_and_a_long_answer_cut(play):
    run = play((0.0, 1000, 1), (10.0, 990, 50), engine={"max_model_length": 1000}).run
    assert [(r.outcome, r.output_tokens) for r in run.requests] == [(Outcome.FAILED, 1), (Outcome.FINISHED, 10)]
