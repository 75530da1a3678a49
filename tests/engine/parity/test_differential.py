"""The differential run: one model, and what counts as a problem. `make soak` runs every family."""

from dataclasses import replace

from quire_parity.differential import CASES, LIMIT, MODES, Result, compare

RIGHT = Result(
    name="a model",
    requests=1,
    tokens=1,
    gap=LIMIT,
    error=LIMIT,
    preemptions=dict.fromkeys(MODES, 1),
    prefix_cache_hits=1,
)


def test_random_mixed_requests_give_the_logits_of_transformers() -> None:
    found = compare("mistral, window", requests=16, seed=1)
    assert found.problems == [] and found.requests == 32 and found.tokens > 200


def test_differences_and_missing_events_are_problems() -> None:
    assert RIGHT.problems == []
    assert len(replace(RIGHT, gap=2 * LIMIT, error=float("nan")).problems) == 2
    assert len(replace(RIGHT, preemptions=dict.fromkeys(MODES, 0), prefix_cache_hits=0).problems) == 3


def test_every_kind_of_model_takes_part() -> None:
    families = {case.family for case in CASES.values()}
    assert {"llama", "mistral3", "gpt_oss"} <= families and len(families) >= 24
