"""Any schedule keeps the books: blocks and rows add up, and each answer equals that of the request alone."""

from collections.abc import Callable
from typing import Any

from fixed_drafts import use_every_draft
from hypothesis import given
from hypothesis import strategies as st

from quire_engine.core.preemption_cost import MeasuredRates
from quire_engine.core.sampling_params import SamplingParams
from quire_engine.core.speculation.proposers import NgramSettings, OpenProposer, ngram_proposers
from quire_engine.core.speculation.speculation import Speculation
from quire_engine.core.stall_bound import StepCosts

VOCABULARY = 7
FREE_DRAFTS = StepCosts(fixed=1.0, per_token=1e-6, per_pair=1e-9)
MAX_MODEL_LEN = 60

# Prompts of any length that share beginnings; some are larger than the cache.
prompts = st.builds(
    lambda head, tail: [1, 2, 3, 4, 5, 6] * head + tail,
    st.integers(0, 4),
    st.lists(st.integers(1, VOCABULARY - 1), min_size=1, max_size=20),
)
params = st.builds(
    SamplingParams,
    max_tokens=st.sampled_from([1, 2, 9, 20, 30, 40, 50, 55]),
    ignore_eos=st.sampled_from([True, True, False]),
    min_tokens=st.sampled_from([0, 0, 3]),
    stop_token_ids=st.sampled_from([(), (), (), (3,)]),
    prompt_logprobs=st.sampled_from([None, None, None, 0, 2]),
)
additions = st.tuples(
    st.just("add"),
    prompts,
    params,
    st.integers(0, 2),
    st.sampled_from([None, None, "tenant"]),
    st.sampled_from([3, 2, 1, 4]),
    st.booleans(),
)
actions = st.lists(
    st.one_of(
        additions,
        additions,
        st.tuples(st.just("step"), st.integers(1, 12)),
        st.tuples(st.just("cancel"), st.integers(0, 30)),
        st.tuples(st.just("forget")),
    ),
    min_size=6,
    max_size=30,
)
# Caches of 40 to 70 tokens, with answers of up to 60 and up to six of them at once: most runs preempt.
worlds = st.fixed_dictionaries(
    {
        "cache_tokens": st.integers(40, 70),
        "block_size": st.sampled_from([1, 2, 3, 4, 8]),
        "windows": st.sampled_from([(None,), (None,), (None, 5), (None, 4, 7), (6,), (3, 8)]),
        "max_num_seqs": st.sampled_from([1, 3, 6, 6]),
        "budget": st.integers(6, 40),
        "overlap": st.booleans(),
        "caching": st.booleans(),
        "positions": st.sampled_from([1, 3, 256]),
        "policy": st.sampled_from(["fcfs", "priority", "fair"]),
        "preemption_mode": st.sampled_from(["auto", "swap", "auto", "swap", "recompute"]),
        "num_swap_blocks": st.sampled_from([100, 100, 100, 12, 4, 0]),
        "max_stall": st.sampled_from([0.0, 0.0, 4.0, 15.0]),
        "tokens_at_once": st.sampled_from([1, 1, 1, 2, 5]),
        "max_step": st.sampled_from([None, 12.0, 30.0]),
        "drafts": st.sampled_from([0, 0, 1, 3, 7]),
        "plain_steps": st.sampled_from([None, None, 0, 1, 5]),
        "wrong_guesses": st.sampled_from([None, 2, 5]),
        "stages": st.sampled_from([1, 1, 2, 3]),
    }
)
# The runner's reported cost of a token and of copying a block; either may be cheaper.
speeds = st.tuples(st.sampled_from([1.0, 1.0, 0.0]), st.sampled_from([0.1, 0.5, 1.0, 4.0, 0.0]))


class Play:
    """An execution of a script that remembers the expected answer of each request."""

    def __init__(self, here: Any, expected_tokens: Callable[..., list[int]]) -> None:
        self.here = here
        self.expected_tokens = expected_tokens
        self.expected: dict[int, list[int]] = {}
        self.prompts: dict[int, list[int]] = {}
        """The prompts of requests that ask for prompt logprobs."""
        self.cancelled: set[int] = set()

    def add(
        self,
        number: int,
        prompt: list[int],
        params: SamplingParams,
        priority: int,
        salt: str | None,
        copies: int,
        forked: bool,
    ) -> None:
        for key in range(number * 10, number * 10 + copies):
            parent = number * 10 if forked and key > number * 10 else None
            tenant = None if priority == 2 else str(priority)
            if (
                self.here.add(key, prompt, params=params, priority=priority, salt=salt, parent=parent, tenant=tenant)
                is None
            ):
                self.expected[key] = self.expected_tokens(
                    prompt, params, vocab_size=VOCABULARY, max_model_len=MAX_MODEL_LEN
                )
                if params.prompt_logprobs is not None and len(prompt) > 1:
                    self.prompts[key] = prompt

    def step(self, number: int, count: int) -> None:
        for _ in range(count):
            if self.here.engine.has_work:
                self.here.step()

    def cancel(self, number: int, index: int) -> None:
        if self.expected:
            victim = sorted(self.expected)[index % len(self.expected)]
            if self.here.engine.cancel(victim):
                self.cancelled.add(victim)
            else:
                assert victim in self.here.finished or victim in self.cancelled

    def forget(self, number: int) -> None:
        self.here.engine.forget_prefixes()


@given(world=worlds, speed=speeds, script=actions)
def test_any_schedule_conserves_blocks_and_answers_as_alone(
    make_world: Callable[..., Any],
    expected_tokens: Callable[..., list[int]],
    world: dict[str, Any],
    speed: tuple[float, float],
    script: list[Any],
) -> None:
    apart = ("cache_tokens", "drafts", "plain_steps", "wrong_guesses")
    shape = {name: value for name, value in world.items() if name not in apart}
    overlap = world["overlap"] and world["stages"] == 1
    shape["overlap"] = overlap
    if overlap or world["drafts"]:
        shape["tokens_at_once"] = 1
    guesses = world["drafts"] and world["wrong_guesses"] is not None and world["windows"] == (None,)
    if world["drafts"]:
        # With seven different tokens, one recent token has nearly always occurred before.
        ngrams = NgramSettings(shortest=1, longest=3)
        shape["speculation"] = speculation = Speculation(
            (lambda sequence: OpenProposer()) if guesses else ngram_proposers(ngrams),
            max_tokens=world["drafts"],
            most_drafts=10,
            costs=FREE_DRAFTS,
            seconds_per_pass=1e-9 if guesses else None,
        )
        if world["plain_steps"] is not None:
            use_every_draft(speculation, plain=world["plain_steps"])
    num_blocks = world["cache_tokens"] // world["block_size"]
    # Without a start value nothing is swapped, so the speed of copies would never be learned.
    rates = MeasuredRates(
        seconds_per_token=speed[0] or None,
        swap_bytes_per_second=1.0 / speed[1] if speed[1] else None,
        block_bytes=[1] * len(world["windows"]),
    )
    here = make_world(**shape, num_blocks=num_blocks, max_model_len=MAX_MODEL_LEN, vocab_size=VOCABULARY, rates=rates)
    here.runner.token_seconds, here.runner.copy_seconds = speed
    if guesses:
        here.runner.wrong_guesses = world["wrong_guesses"]
    play = Play(here, expected_tokens)
    for number, (kind, *arguments) in enumerate(script):
        getattr(play, kind)(number, *arguments)
        here.engine.check_integrity()
    here.run()

    assert set(here.finished) == set(play.expected) - play.cancelled
    for key, answer in play.expected.items():
        said = here.tokens.get(key, [])
        assert said == (answer[: len(said)] if key in play.cancelled else answer)
    assert set(here.reported) <= set(play.prompts)
    for key, prompt in play.prompts.items():
        told = here.reported.get(key, [])
        assert told == prompt[1:] if key not in play.cancelled else told == prompt[1 : 1 + len(told)]
    gauges = here.engine.gauges()
    assert (gauges.blocks_used, gauges.num_running, gauges.num_waiting, gauges.queued_tokens) == (0, 0, 0, 0)
    assert (gauges.swap_blocks_used, gauges.prefilling_tokens, gauges.parked_tokens) == (0, 0, 0)
    assert here.engine.counters.generation_tokens == sum(map(len, here.tokens.values()))
    if not world["overlap"] and world["stages"] == 1 and world["tokens_at_once"] == 1 and not world["drafts"]:
        assert here.engine.counters.discarded_tokens == 0
