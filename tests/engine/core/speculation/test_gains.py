"""Drafts are used where they pay, soon, and lose next to nothing where they do not, also if times are noisy.

``simulate`` runs the scheduler with a machine whose costs are known. Noise is seeded: the target and the draft model
take up to 15 % more or less, and one time in twenty up to four times as long, as on a busy machine.
"""

import random
from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest
from quire_guard.counting import python_cost

from quire_engine.core.batch import Batch, RunnerOutput
from quire_engine.core.kv_layout import KVCacheGroup, KVCacheLayout
from quire_engine.core.options import ModelTraits, SchedulerOptions
from quire_engine.core.sampling_params import SamplingParams
from quire_engine.core.scheduler import Scheduler
from quire_engine.core.sequence import Request
from quire_engine.core.speculation.proposers import OpenProposer
from quire_engine.core.speculation.speculation import Speculation
from quire_engine.core.stall_bound import StepCosts

_PROMPT = 24


@dataclass(frozen=True, kw_only=True)
class Machine:
    """The true costs in milliseconds, and the share of first drafts, of second drafts, ... that are accepted."""

    step: tuple[tuple[int, float], ...] = ((1, 1.0), (1024, 11.0))
    """The time of a target's step at some numbers of tokens; between them it is on a line."""
    first_pass: float = 0.1
    next_pass: float = 0.1
    accepted: tuple[float, ...] = (0.8,)
    per_missed: float = 0.01
    """The draft model's time for a token of a sequence that it has missed; it computes at most 64."""
    prompt: float = 0.1
    """The draft model's time for the prompts of a step."""
    host: float = 0.05
    """The scheduler's time; twice as much with drafts."""

    def target(self, tokens: int) -> float:
        place = max(1, bisect_left(self.step, (tokens, 0.0)))
        (low, less), (high, more) = self.step[place - 1 : place + 1]
        return less + (more - less) * (tokens - low) / (high - low)

    def draft(self, passes: int) -> float:
        return self.first_pass + (passes - 1) * self.next_pass if passes else 0.0


DEMO = Machine(  # the demo pair on a CPU: a step of the draft model costs half as much as one of the target
    step=((1, 2.4), (2, 2.6), (9, 3.3), (32, 6.9), (64, 11.2), (96, 24.5), (159, 36.0), (282, 70.0), (1024, 260.0)),
    first_pass=1.8,
    next_pass=0.3,
    accepted=(0.66, 0.78, 0.87, 0.93),
    per_missed=0.05,
    prompt=1.4,
    host=0.4,
)
PADDED = Machine(  # the same draft model with a target of 24 layers
    step=((1, 5.3), (2, 5.5), (9, 8.3), (32, 19.0), (64, 37.8), (96, 70.0), (159, 92.0), (282, 164.0), (1024, 600.0)),
    first_pass=1.8,
    next_pass=0.3,
    accepted=(0.66, 0.78, 0.87, 0.93),
    per_missed=0.05,
    prompt=1.4,
    host=0.4,
)
REJECTED = Machine(accepted=(0.0,))
DEAR_PASSES = Machine(first_pass=1.0, next_pass=1.0)
DEAR_TOKENS = Machine(step=((1, 2.0), (1024, 2048.0)), first_pass=0.8, next_pass=0.8, accepted=(0.5,))
BREAK_EVEN = Machine(step=((1, 1.0), (1024, 31.0)), first_pass=0.5, next_pass=0.5, accepted=(0.75,))


@dataclass(kw_only=True)
class Simulated:
    speed: float
    """Tokens per millisecond in true costs, without noise."""
    steps: int
    drafted_steps: list[int] = field(default_factory=list)


def simulate(
    machine_at: Callable[[int], Machine],
    *,
    sequences: int | Callable[[int], int],
    steps: int,
    seed: int = 0,
    speculates: bool = True,
    answer: tuple[int, int] = (24, 48),
) -> Simulated:
    """Simulate clients of which each sends its next request when its last one is answered.

    ``machine_at`` gives the machine of each step. The warm-up measured a third of the true cost of a draft model's
    pass, and half of the true cost of a token.
    """
    chance = random.Random(seed)
    first = machine_at(0)
    costs = StepCosts(
        fixed=first.target(1) / 1e3, per_token=(first.target(64) - first.target(32)) / 64e3, per_pair=1e-12
    )
    speculation = Speculation(
        lambda sequence: OpenProposer(),
        max_tokens=8,
        most_drafts=256,
        costs=costs,
        seconds_per_pass=first.first_pass / 3e3,
    )
    layout = KVCacheLayout(block_size=16, groups=(KVCacheGroup(layers=(0,), num_blocks=4096, window=None),))
    options = SchedulerOptions(max_num_seqs=64, max_num_batched_tokens=2048, enable_prefix_caching=False)
    model = ModelTraits(max_model_len=2048)
    scheduler = Scheduler(options, model, layout, speculation=speculation if speculates else None)
    key = live = tokens = 0
    total, drafted = 0.0, []
    streaks: dict[int, int] = {}
    missed: dict[int, int] = {}
    for step in range(steps):
        machine = machine_at(step)
        while live < (sequences if isinstance(sequences, int) else sequences(step)):
            params = SamplingParams(max_tokens=chance.randint(*answer), ignore_eos=True)
            scheduler.add(Request(key=key, prompt_token_ids=[1] * _PROMPT, params=params, seed=0))
            key, live = key + 1, live + 1
        batch = scheduler.schedule()
        assert batch is not None
        target, draft = _times(machine, scheduler, batch, missed, speculates=speculates)
        counts = _accept(machine, scheduler, batch, streaks, chance)
        own, drafting = target * _noise(chance), draft * _noise(chance)
        host = machine.host * (2 if batch.num_drafts else 1)
        output = RunnerOutput(
            token_ids=[5] * sum(counts),
            counts=counts if batch.num_drafts else None,
            run_seconds=own / 1e3,
            draft_seconds=drafting / 1e3,
        )
        done = scheduler.commit(batch, output, elapsed=(own + drafting + host) / 1e3)
        total += target + draft + host
        tokens, live = tokens + len(done.keys), live - len(done.finished)
        if batch.num_drafts:
            drafted.append(step)
    return Simulated(speed=tokens / total, steps=steps, drafted_steps=drafted)


def _times(
    machine: Machine, scheduler: Scheduler, batch: Batch, missed: dict[int, int], *, speculates: bool
) -> tuple[float, float]:
    """Return the true times of the target and of the draft model, and count the tokens that it misses."""
    plan = scheduler._in_flight[-1]
    target = machine.target(batch.num_tokens)
    if not speculates:
        return target, 0.0
    draft = machine.draft(max(batch.num_drafts, default=0))
    prepares = plan.prompts.tokens > 0 and batch.prepares_drafts
    for place, sequence in enumerate(plan.sequences):
        if batch.num_drafts and batch.num_drafts[place]:
            draft += machine.per_missed * min(64, missed.get(sequence.key, 0))
            missed[sequence.key] = 0
        else:
            missed[sequence.key] = missed.get(sequence.key, 0) + batch.num_scheduled[place]
        if prepares and batch.num_computed[place] == 0:
            missed[sequence.key] = 0
    return target, draft + (machine.prompt if prepares else 0.0)


def _accept(
    machine: Machine, scheduler: Scheduler, batch: Batch, streaks: dict[int, int], chance: random.Random
) -> list[int]:
    """Return the number of tokens of each sequence. The longer the draft model is right, the likelier it stays so."""
    counts = []
    plan = scheduler._in_flight[-1]
    drafts = plan.drafts_of_sampled() if batch.num_drafts else [0] * len(plan.sampled)
    for sequence, most in zip(plan.sampled, drafts, strict=True):
        count, streak = 0, streaks.get(sequence.key, 0)
        while count <= most:
            count += 1
            right = chance.random() < machine.accepted[min(streak, len(machine.accepted) - 1)]
            streak = streak + 1 if right else 0
            if not right:
                break
        streaks[sequence.key] = streak
        counts.append(count)
    return counts


def _noise(chance: random.Random) -> float:
    return chance.uniform(0.85, 1.15) * (chance.uniform(1.5, 4.0) if chance.random() < 0.05 else 1.0)


@pytest.mark.parametrize(
    ("machine", "sequences", "least"),
    [
        (DEMO, 1, 1.5),
        (DEMO, 4, 1.1),
        (DEMO, 32, 0.97),
        (PADDED, 1, 1.8),
        (PADDED, 4, 1.2),
        (PADDED, 32, 0.97),
        (REJECTED, 1, 0.98),
        (REJECTED, 2, 0.98),
        (REJECTED, 4, 0.98),
        (REJECTED, 32, 0.98),
        (DEAR_PASSES, 1, 0.98),
        (DEAR_PASSES, 4, 0.98),
        (DEAR_PASSES, 32, 0.97),
        (DEAR_TOKENS, 1, 0.98),
        (DEAR_TOKENS, 4, 0.98),
        (BREAK_EVEN, 1, 0.97),
        (BREAK_EVEN, 4, 0.97),
    ],
)
def test_gains_are_kept_and_losses_bounded(machine: Machine, sequences: int, least: float) -> None:
    steps = 2000 if sequences < 8 else 700
    found, without = (
        simulate(lambda step: machine, sequences=sequences, steps=steps, speculates=speculates)
        for speculates in (True, False)
    )
    assert found.speed / without.speed > least


@pytest.mark.parametrize("machine", [REJECTED, DEAR_PASSES])
def test_a_draft_model_that_never_pays_is_tried_again_but_seldom(machine: Machine) -> None:
    found = simulate(lambda step: machine, sequences=4, steps=4000)
    assert any(step > 1000 for step in found.drafted_steps)
    assert len(found.drafted_steps) < 0.02 * found.steps


@pytest.mark.parametrize("machine", [DEMO, PADDED])
def test_drafts_start_with_the_first_answers(machine: Machine) -> None:
    found = simulate(lambda step: machine, sequences=1, steps=300)
    assert found.drafted_steps[0] <= 4
    assert sum(step < 100 for step in found.drafted_steps) > 40


@pytest.mark.parametrize(
    ("before", "after", "within", "pays"),
    [
        (REJECTED, Machine(accepted=(0.9,)), 1500, True),
        (Machine(accepted=(0.9,)), REJECTED, 100, False),
        (Machine(), DEAR_PASSES, 60, False),
        (DEAR_PASSES, Machine(), 1500, True),
        (Machine(), Machine(step=((1, 0.05), (1024, 10.0))), 400, False),  # a step without drafts is cheap now
    ],
)
def test_drafts_start_or_stop_after_costs_change(before: Machine, after: Machine, within: int, pays: bool) -> None:
    change = 2000
    found = simulate(lambda step: before if step < change else after, sequences=4, steps=change + within + 300)
    share = sum(step >= change + within for step in found.drafted_steps) / 300
    assert share > 0.5 if pays else share < 0.2


def test_each_load_has_the_drafts_that_pay_there() -> None:
    """One client and 32 take turns: drafts pay for the one only."""
    turns = simulate(lambda step: PADDED, sequences=lambda step: 1 if step // 200 % 2 else 32, steps=3000)
    few = [step for step in turns.drafted_steps if step // 200 % 2 and step % 200 > 100]
    many = [step for step in turns.drafted_steps if not step // 200 % 2]
    assert len(few) > 0.4 * 700 and len(many) < 0.1 * 1600


def test_drafts_are_found_to_pay_while_every_step_has_prompts() -> None:
    found = simulate(lambda step: Machine(first_pass=0.05, next_pass=0.05), sequences=16, steps=600, answer=(8, 16))
    assert len(found.drafted_steps) > 400


def test_a_step_in_a_pause_costs_the_scheduler_next_to_nothing() -> None:
    """The number of sequences does not matter: nothing is planned for them."""
    speculation = Speculation(
        lambda sequence: OpenProposer(), max_tokens=4, most_drafts=256, costs=None, seconds_per_pass=9.0
    )
    policy = speculation._policy
    while not policy._now.wait > 8:
        if policy.begin_step(64):
            assert not any(policy.choose([0.5] * 64, [4] * 64, others=0))
    assert python_cost(lambda: policy.begin_step(64)).instructions < 80
    seconds = 1.0
    assert python_cost(lambda: policy.observe_step(64, seconds)).instructions < 120
