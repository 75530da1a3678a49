"""An engine that speculates schedules one step ahead while no sequence has drafts, and waits where drafts need it."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest
from fake_runner import FakeForward, FakeRunner
from fixed_drafts import use_every_draft

from quire_engine.core.sampling_params import SamplingParams
from quire_engine.core.speculation.proposers import OpenProposer
from quire_engine.core.speculation.speculation import Speculation
from quire_engine.core.stall_bound import StepCosts

CHEAP = StepCosts(fixed=1.0, per_token=1e-6, per_pair=1e-9)
PROMPTS = ([1, 2, 3], [9, 8, 7, 6], [5])


@dataclass(frozen=True)
class Known:
    """A proposer that knows the answer after some of its tokens, and is wrong about every fifth one."""

    whole: list[int]
    since: int = 0

    def propose(self, token_ids: list[int], most: int) -> list[int]:
        assert token_ids == self.whole[: len(token_ids)]
        if len(token_ids) < self.since:
            return []
        begin = len(token_ids)
        proposed = [*self.whole[begin : begin + most], *[0] * most][:most]
        return [token + (place % 5 == 0) for place, token in enumerate(proposed, start=begin)]


@pytest.fixture
def speculating(make_world: Callable[..., Any], expected_tokens: Callable[..., list[int]]) -> Callable[..., Any]:
    """Return a function that gives a world with requests, and their expected answers."""

    def make(*, overlap: bool = True, since: int = 0, params: SamplingParams | None = None, **world: Any) -> Any:
        params = params or SamplingParams(max_tokens=60, ignore_eos=True)
        expected = {
            key: expected_tokens(prompt, params, vocab_size=50, max_model_len=200) for key, prompt in enumerate(PROMPTS)
        }
        speculation = Speculation(
            lambda sequence: Known([*sequence.request.prompt_token_ids, *expected[sequence.key]], since),
            max_tokens=3,
            most_drafts=256,
            costs=CHEAP,
        )
        here = make_world(speculation=speculation, overlap=overlap, **world)
        for key, prompt in enumerate(PROMPTS):
            assert here.add(key, prompt, params=params) is None
        return here, expected

    return make


def depths(here: Any) -> list[int]:
    """Run a world to its end; return the number of steps in flight after each call."""
    found = []
    while here.engine.has_work:
        here.step()
        found.append(len(here.engine._flights))
    return found


@pytest.mark.parametrize("plain", [1, 2, 7])
def test_pauses_run_ahead_and_drafts_wait_for_the_commit(speculating: Callable[..., Any], plain: int) -> None:
    here, expected = speculating()
    use_every_draft(here.scheduler._speculation, plain=plain)
    found = depths(here)
    assert here.tokens == expected
    counters = here.engine.counters
    assert counters.accepted_tokens > 10 and counters.draft_tokens > counters.accepted_tokens
    assert max(found) == 1, "a call leaves at most one step in flight"
    # Two steps with drafts are followed by ``plain`` steps, of which the last one is committed before drafts.
    assert abs(found.count(1) / len(found) - plain / (plain + 2)) < 0.25


def test_engine_with_preemption_and_cancels_answers_as_alone(speculating: Callable[..., Any]) -> None:
    here, expected = speculating(num_blocks=24, num_swap_blocks=20, preemption_mode="swap", max_num_seqs=3)
    use_every_draft(here.scheduler._speculation, plain=3)
    for _ in range(30):
        here.step()
    here.engine.cancel(1)
    here.run()
    assert +here.engine.counters.preemptions
    assert here.tokens[0] == expected[0] and here.tokens[2] == expected[2]
    assert here.tokens[1] == expected[1][: len(here.tokens[1])]


@pytest.mark.parametrize(("since", "drafts"), [(1000, False), (40, True)])
def test_engine_runs_ahead_until_there_are_proposals(speculating: Callable[..., Any], since: int, drafts: bool) -> None:
    """Drafts pay, but no sequence has a proposal before ``since`` tokens."""
    here, expected = speculating(since=since)
    use_every_draft(here.scheduler._speculation)
    found = depths(here)
    assert here.tokens == expected
    assert (here.engine.counters.num_drafts > 0) == drafts
    ahead = found[: 3 * since // 4]
    # The first two calls find out that there is no proposal.
    assert sum(ahead) >= min(len(ahead), 30) - 3


def test_sequences_that_take_no_drafts_run_ahead(speculating: Callable[..., Any]) -> None:
    here, expected = speculating(params=SamplingParams(max_tokens=40, ignore_eos=True, presence_penalty=1.0))
    use_every_draft(here.scheduler._speculation)
    found = depths(here)
    assert here.tokens == expected and sum(found) >= len(found) - 5


def test_synchronous_engine_commits_each_step_at_once(speculating: Callable[..., Any]) -> None:
    here, expected = speculating(overlap=False)
    use_every_draft(here.scheduler._speculation, plain=4)
    assert set(depths(here)) == {0} and here.tokens == expected


def test_stages_do_not_wait_for_drafts_of_other_sequences(speculating: Callable[..., Any]) -> None:
    here, expected = speculating(overlap=False, stages=2)
    use_every_draft(here.scheduler._speculation)
    assert max(depths(here)) == 1 and here.tokens == expected
    assert here.engine.counters.accepted_tokens > 10


@pytest.fixture
def guessing(make_world: Callable[..., Any], expected_tokens: Callable[..., list[int]]) -> Callable[..., Any]:
    """Return a function that gives a world with requests and a runner's draft model, and their expected answers."""

    def make(params: SamplingParams, *, wrong: int = 5, drafts: int = 3, **world: Any) -> Any:
        speculation = Speculation(
            lambda sequence: OpenProposer(),
            max_tokens=drafts,
            most_drafts=256,
            costs=CHEAP,
            seconds_per_pass=1e-9,
        )
        use_every_draft(speculation)
        here = make_world(speculation=speculation, overlap=True, **world)
        here.runner.wrong_guesses = wrong
        expected = {}
        for key, prompt in enumerate(PROMPTS):
            assert here.add(key, prompt, params=params) is None
            expected[key] = expected_tokens(prompt, params, vocab_size=50, max_model_len=200)
        return here, expected

    return make


LONG = SamplingParams(max_tokens=60, ignore_eos=True)


@pytest.mark.parametrize("wrong", [1, 2, 1000])
@pytest.mark.parametrize("drafts", [1, 7])
def test_drafts_of_a_model_wait_for_the_commit(guessing: Callable[..., Any], wrong: int, drafts: int) -> None:
    here, expected = guessing(LONG, wrong=wrong, drafts=drafts, budget=40)
    found = depths(here)
    assert here.tokens == expected
    counters = here.engine.counters
    assert counters.num_drafts > 10 and (counters.accepted_tokens > 60 or wrong == 1)
    assert found.count(0) >= len(found) // 2 - 1, "each second call waits for the drafts of the one before"


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(max_tokens=60),
        SamplingParams(max_tokens=60, stop_token_ids=(3, 7), ignore_eos=True),
        SamplingParams(max_tokens=60, logprobs=2, ignore_eos=True),
        SamplingParams(max_tokens=60, presence_penalty=1.0, ignore_eos=True),
        SamplingParams(max_tokens=1, ignore_eos=True),
        SamplingParams(max_tokens=2, ignore_eos=True),
        SamplingParams(max_tokens=199, ignore_eos=True),
    ],
    ids=["end of text", "stop tokens", "logprobs", "penalties", "one token", "two tokens", "up to the length"],
)
def test_answers_end_where_they_do_without_drafts(guessing: Callable[..., Any], params: SamplingParams) -> None:
    here, expected = guessing(params)
    here.run()
    assert here.tokens == expected


def test_sequences_that_take_no_drafts_run_with_those_that_do(
    guessing: Callable[..., Any], expected_tokens: Callable[..., list[int]]
) -> None:
    here, expected = guessing(LONG)
    edited = replace(LONG, repetition_penalty=1.5)
    assert here.add(9, [4, 4, 4], params=edited) is None
    expected[9] = expected_tokens([4, 4, 4], edited, vocab_size=50, max_model_len=200)
    here.run()
    assert here.tokens == expected
    assert here.engine.counters.undrafted_sequences["penalties"] >= 50


def test_costs_are_the_times_between_outputs(make_world: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """A runner reports equal times with drafts, but the output arrives only after thrice the time."""
    clock = [0.0]
    speculation = Speculation(
        lambda sequence: OpenProposer(), max_tokens=1, most_drafts=8, costs=CHEAP, seconds_per_pass=1e-9
    )
    here = make_world(speculation=speculation, overlap=True)
    here.engine._now = lambda: clock[0]
    sample = FakeRunner.sample

    def timed(runner: FakeRunner, forward: FakeForward, masks: Any) -> Any:
        clock[0] += 3.0 if forward.batch.num_drafts else 1.0
        return sample(runner, forward, masks)

    monkeypatch.setattr(FakeRunner, "sample", timed)
    here.runner.token_seconds = 1e-3
    here.add(0, [1, 2, 3], params=SamplingParams(max_tokens=150, ignore_eos=True))
    here.run()
    counters = here.engine.counters
    assert 0 < counters.num_drafts < 12
