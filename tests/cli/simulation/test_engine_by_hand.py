"""One replica, with times that can be computed by hand: chunks, batches, queues, blocks, prefixes, stalls."""

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


def test_prompt_beyond_the_token_budget_takes_several_steps(play):
    run = play((0.0, 250, 1), engine={"max_batched_tokens": 100}).run
    assert first_tokens(run) == [3 * 0.1 + 0.25]
    assert run.requests[0].own_prefill_seconds == pytest.approx(0.55)


def test_prefill_steps_of_a_single_prompt_stay_below_two_seconds(play):
    """Expect steps of 1,900, 1,900 and 200 tokens, although the token budget has room for one of 4.1 s."""
    run = play((0.0, 4000, 1), engine={"max_batched_tokens": 8000}).run
    assert first_tokens(run) == [3 * 0.1 + 4.0]


def test_simultaneous_requests_share_a_step(play):
    run = play((0.0, 100, 3), (0.0, 50, 2)).run
    assert first_tokens(run) == [0.25, 0.25]
    assert finishes(run) == [0.25 + 0.12 + 0.11, 0.25 + 0.12]


def test_the_token_budget_is_shared_in_order_of_arrival(play):
    run = play((0.0, 150, 1), (0.0, 100, 1), engine={"max_batched_tokens": 200}).run
    # 150 + 50 tokens, then the other 50.
    assert first_tokens(run) == [0.3, 0.3 + 0.15]


def test_prompt_joins_decoding_sequences_at_the_next_step(play):
    run = play((0.0, 100, 100), (0.25, 100, 1)).run
    # Steps end at 0.2, 0.31 and 0.52: the second is in progress when the prompt arrives, the third contains it.
    assert run.requests[1].first_token == pytest.approx(0.31 + 0.1 + 0.01 + 0.1)


def test_request_arriving_at_the_end_of_a_step_is_in_the_next(play):
    run = play((0.0, 100, 100), (0.2 + 0.11, 100, 1)).run
    assert run.requests[1].first_token == pytest.approx(0.31 + 0.21)


def test_decode_steps_take_longer_with_context(play):
    run = play((0.0, 100, 4), engine={"decode_seconds_per_kv_token": 0.001}).run
    steps = [0.1 + 0.01 + 0.001 * tokens for tokens in (100, 101, 102)]
    assert finishes(run) == [0.2 + sum(steps)]


def test_running_sequences_are_limited(play):
    run = play((0.0, 100, 3), (0.0, 100, 3), (0.0, 100, 3), engine={"max_sequences": 2}).run
    assert finishes(run)[:2] == [0.3 + 2 * 0.12] * 2
    assert run.requests[2].first_token == pytest.approx(0.54 + 0.2)


def test_request_that_does_not_fit_waits_without_being_overtaken(play):
    # Ten blocks of 16: the second does not fit next to the first, and the third, which would, stays behind it.
    run = play((0.0, 96, 11), (1.0, 96, 1), (1.0, 16, 1), engine={"kv_tokens": 160}).run
    first, second, third = run.requests
    assert first.finish == pytest.approx(0.196 + 10 * 0.11)
    assert second.first_token == third.first_token == pytest.approx(first.finish + 0.1 + 0.112)


def test_request_larger_than_the_cache_is_refused(play):
    run = play((0.0, 161, 1), (0.0, 160, 1), (0.0, 160, 2), engine={"kv_tokens": 160}).run
    assert [r.outcome for r in run.requests] == [Outcome.FAILED, Outcome.FINISHED, Outcome.FAILED]


def test_last_sequence_is_preempted_when_blocks_run_out(play):
    # Ten blocks of 16: two of 64 tokens fit until both take a sixth block, at their 81st token.
    run = play((0.0, 64, 40), (0.0, 64, 40), engine={"kv_tokens": 160}).run
    first, second = run.requests
    assert (first.preemptions, second.preemptions) == (0, 1)
    both = 0.1 + 0.128 + 16 * 0.12  # 64 to 80 tokens
    assert first.finish == pytest.approx(both + (39 - 16) * 0.11)
    # 81 tokens are known of the other: as a prompt they fit next to no other, and sample the next token.
    assert second.first_token == pytest.approx(0.228)
    assert second.finish == pytest.approx(first.finish + 0.1 + 0.081 + (39 - 17) * 0.11)


def test_prompt_chunks_respect_the_stall_bound_of_decoders(play):
    # Decoding takes 0.11 s, and a little over 0.15 s is allowed: 40 prompt tokens a step.
    run = play((0.0, 100, 100), (0.2, 120, 1), engine={"max_generation_stall_seconds": 0.1505}).run
    assert run.requests[1].first_token == pytest.approx(0.2 + 3 * 0.15)


def test_prompt_gets_a_quarter_of_a_bound_exceeded_by_decoding(play):
    run = play((0.0, 100, 100), (0.2, 60, 1), engine={"max_generation_stall_seconds": 0.08}).run
    assert run.requests[1].first_token == pytest.approx(0.2 + 3 * (0.11 + 0.02))


@pytest.mark.parametrize(
    ("caching", "cached"),
    [(True, [0, 512, 1024]), (False, [0, 0, 0])],
)
def test_computed_prefix_is_found_in_the_cache(play, caching, cached):
    prompts = [
        Request(0.0, 1030, 1, (1, 2, 3)),  # its last block is partial
        Request(10.0, 1024, 1, (1, 9)),
        Request(20.0, 1100, 1, (1, 2, 4)),
    ]
    run = play(*prompts, engine={"prefix_caching": caching}).run
    assert [r.cached_tokens for r in run.requests] == cached
    assert run.requests[2].first_token == pytest.approx(20.1 + (1100 - cached[2]) / 1000)


def test_the_last_token_of_a_prompt_is_always_computed(play):
    run = play(Request(0.0, 512, 1, (1,)), Request(10.0, 512, 1, (1,))).run
    assert run.requests[1].cached_tokens == 0


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
