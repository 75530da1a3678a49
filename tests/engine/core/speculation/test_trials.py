"""Drafts are used where they pay, soon, and lose next to nothing where they do not, also if times are noisy.

``simulate`` runs the decisions for steps of a machine whose costs are known. Noise is seeded: a step takes up to 15 %
more or less, and one in twenty takes up to four times as long, as on a busy machine.
"""

import itertools
import random
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest
from quire_guard.counting import python_cost

from quire_engine.core.sampling_params import SamplingParams
from quire_engine.core.sequence import Request, Sequence
from quire_engine.core.speculation.load import DraftedStep, gain, low_quantile, trial_steps
from quire_engine.core.speculation.proposers import OpenProposer
from quire_engine.core.speculation.speculation import Speculation
from quire_engine.core.speculation.trials import DraftTrials, Mode
from quire_engine.core.stall_bound import StepCosts
from quire_engine.core.stats import Counters


@dataclass(frozen=True, kw_only=True)
class Machine:
    """The true costs, in seconds, and the share of drafts that are accepted."""

    fixed: float = 1.0
    per_token: float = 0.01
    per_pass: float = 0.1
    accepted: float = 0.8
    catch_up: float = 0.0
    """The additional time of the first step with drafts after 64 steps without drafts; after fewer, a part of it."""
    noisy: bool = True

    def seconds(self, tokens: int, passes: int, chance: random.Random) -> float:
        exact = self.fixed + self.per_token * tokens + self.per_pass * passes
        if not self.noisy:
            return exact
        return exact * chance.uniform(0.85, 1.15) * (chance.uniform(1.5, 4.0) if chance.random() < 0.05 else 1.0)

    def true_seconds(self, tokens: int, passes: int) -> float:
        return self.fixed + self.per_token * tokens + self.per_pass * passes


@dataclass(kw_only=True)
class Simulated:
    """The totals in true costs, without noise."""

    seconds: float = 0.0
    plain_seconds: float = 0.0
    """The time that the same tokens take without drafts."""
    drafted_seconds: float = 0.0
    drafted_steps: list[int] = field(default_factory=list)

    @property
    def ratio(self) -> float:
        """The speed relative to that without drafts."""
        return self.plain_seconds / self.seconds

    @property
    def drafted_share(self) -> float:
        return self.drafted_seconds / self.seconds


def simulate(
    machine_at: Callable[[int], Machine], *, sequences: int, steps: int, seed: int = 0, most_drafts: int = 4
) -> Simulated:
    """Simulate a draft model for sequences without an end. ``machine_at`` gives the machine of each step.

    The warm-up measured a third of the true cost of a pass, and the true cost of steps.
    """
    chance = random.Random(seed)
    first = machine_at(0)
    speculation = Speculation(
        lambda sequence: OpenProposer(),
        max_tokens=most_drafts,
        most_drafts=256,
        costs=StepCosts(fixed=first.fixed, per_token=first.per_token, per_pair=1e-12),
        seconds_per_pass=first.per_pass / 3,
    )
    running = [_sequence(key) for key in range(sequences)]
    counters, found = Counters(), Simulated()
    missed = 0
    for step in range(steps):
        machine = machine_at(step)
        drafts = speculation.plan(running, counters)
        sampled = sequences
        for key, proposed in drafts.items():
            accepted = 0
            while accepted < len(proposed) and chance.random() < machine.accepted:
                accepted += 1
            speculation.verified(running[key], len(proposed), accepted)
            sampled += accepted
        tokens, passes = sequences + sum(map(len, drafts.values())), max(map(len, drafts.values()), default=0)
        seconds, true = machine.seconds(tokens, passes, chance), machine.true_seconds(tokens, passes)
        drafting = machine.per_pass * passes * seconds / true
        catch_up = machine.catch_up * min(missed, 64) / 64 if drafts else 0.0
        # The first prompts are computed for drafts.
        missed = 0 if drafts or not found.drafted_steps else missed + 1
        seconds, drafting, true = seconds + catch_up, drafting + catch_up, true + catch_up
        speculation.observe_step(
            tokens, seconds - drafting, sequences=sequences, sampled=sampled, passes=passes, draft_seconds=drafting
        )
        found.seconds += true
        found.plain_seconds += machine.true_seconds(sequences, 0) * sampled / sequences
        if drafts:
            found.drafted_seconds += true
            found.drafted_steps.append(step)
    return found


def _sequence(key: int) -> Sequence:
    """Return a sequence that decodes, and whose end is far away."""
    params = SamplingParams(max_tokens=1_000_000)
    request = Request(key=key, prompt_token_ids=[1, 2, 3], params=params, seed=0)
    sequence = Sequence(request, order=(0, key), limit=1_000_000, eos_token_ids=(), num_groups=1)
    sequence.num_prefill = sequence.num_computed = 2
    sequence.row = key
    return sequence


NEVER = {
    "all drafts are rejected": Machine(accepted=0.0),
    "a pass costs as much as a step": Machine(per_pass=1.0),
    "a token costs more than the rest of a step": Machine(per_token=2.0, per_pass=0.8, accepted=0.5),
}


@pytest.mark.parametrize("sequences", [1, 4, 32])
@pytest.mark.parametrize("name", NEVER)
def test_unprofitable_drafts_take_under_one_percent_of_step_time(name: str, sequences: int) -> None:
    found = simulate(lambda step: NEVER[name], sequences=sequences, steps=10_000)
    assert found.drafted_steps, "drafts are tried"
    assert found.drafted_share < 0.01
    assert found.ratio > 0.99
    # The pauses between trials grow: the second half has fewer drafts than the first.
    assert sum(step >= 5_000 for step in found.drafted_steps) < len(found.drafted_steps) / 2


@pytest.mark.parametrize("sequences", [1, 4, 32])
def test_trials_with_much_to_catch_up_cost_under_one_percent(sequences: int) -> None:
    machine = Machine(per_pass=1.0, catch_up=8.0)
    found = simulate(lambda step: machine, sequences=sequences, steps=10_000)
    assert found.ratio > 0.99
    assert sum(step >= 500 for step in found.drafted_steps) > 0, "drafts are tried again"


PAYING = {
    "cheap passes": (Machine(per_pass=0.05, accepted=0.8), 1.9),
    "the demo pair alone": (Machine(per_pass=0.4, accepted=0.95), 1.3),
    "a target of many layers": (Machine(fixed=10.0, per_pass=0.6, accepted=0.8), 2.0),
}


@pytest.mark.parametrize("sequences", [1, 4])
@pytest.mark.parametrize("name", PAYING)
def test_profitable_drafts_start_within_four_steps(name: str, sequences: int) -> None:
    machine, ratio = PAYING[name]
    found = simulate(lambda step: machine, sequences=sequences, steps=2_000)
    assert found.drafted_steps[0] <= 4
    assert len([step for step in found.drafted_steps if step < 100]) > 70
    assert found.ratio > ratio


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("per_pass", [0.3, 0.5, 0.7, 0.9])
def test_drafts_near_break_even_cost_under_two_percent(per_pass: float, seed: int) -> None:
    """Near the point at which drafts begin to pay, decisions are often wrong, and wrong ones are cheap."""
    machine = Machine(per_pass=per_pass, per_token=0.03, accepted=0.75)
    assert simulate(lambda step: machine, sequences=4, steps=6_000, seed=seed).ratio > 0.985


def test_unprofitable_drafts_cost_under_three_percent_of_a_short_run() -> None:
    """A benchmark of 190 steps contains the first trials, and no time to make up for them."""
    found = simulate(lambda step: NEVER["a pass costs as much as a step"], sequences=32, steps=190)
    assert found.ratio > 0.975


@pytest.mark.parametrize(
    ("before", "after", "steps"),
    [
        (Machine(accepted=0.0), Machine(accepted=0.9), 2_400),  # at the next trial, whose pause is at most 2,048 steps
        (Machine(accepted=0.9), Machine(accepted=0.0), 40),
        (Machine(per_pass=0.1), Machine(per_pass=2.0), 40),
        (Machine(), Machine(fixed=0.05, per_pass=0.1), 150),  # a step without drafts is cheap now; it must be measured
    ],
)
def test_drafts_start_or_stop_after_costs_change(before: Machine, after: Machine, steps: int) -> None:
    change = 3_000
    found = simulate(lambda step: before if step < change else after, sequences=4, steps=change + steps + 200)
    late = [step for step in found.drafted_steps if step >= change + steps]
    if before.accepted == 0.0:
        assert len(late) > 150
    else:
        assert len(late) < 40


@pytest.mark.parametrize("sequences", [1, 64])
def test_planning_a_paused_step_costs_the_same_for_any_batch_size(sequences: int) -> None:
    speculation = Speculation(
        lambda sequence: OpenProposer(), max_tokens=4, most_drafts=256, costs=None, seconds_per_pass=9.0
    )
    running, counters = [_sequence(key) for key in range(sequences)], Counters()
    for _ in range(12):
        drafts = len(speculation.plan(running, counters))
        seconds = 1.0 + 9.0 * (drafts > 0)
        speculation.observe_step(
            sequences + drafts, seconds, sequences=sequences, sampled=sequences, passes=min(1, drafts)
        )
    assert speculation.is_paused(sequences)
    assert python_cost(lambda: speculation.plan(running, counters)).instructions < 150


def test_each_load_has_its_own_trial() -> None:
    trials = DraftTrials(most_sequences=64)
    for sequences, seconds in ((1, 1.2), (32, 3.0)):
        for _ in range(12):
            if trials.mode(sequences) in (Mode.OFF, Mode.PLAIN):
                trials.observe_plain(1.0)
            else:
                trials.observe_drafted(seconds, expected=1.0, yielded=2.0, sequences=sequences)
    assert trials.mode(1) is Mode.ON and trials.pays
    assert trials.mode(32) is Mode.OFF and not trials.pays


@pytest.mark.parametrize(("plain_left", "drafts"), [(2, 0), (0, 1)])
def test_steps_ahead_have_no_drafts_amid_a_measurement(plain_left: int, drafts: int) -> None:
    """A step with prompts takes no part in a measurement without drafts, but the tokens before it are not known."""
    speculation = Speculation(lambda sequence: OpenProposer(), max_tokens=4, most_drafts=8, costs=None)
    load = speculation._trials._loads[0]
    load.uses, load.plain_left = True, plain_left
    sequence = _sequence(0)
    planned = speculation.plan([sequence], Counters(), step=2, ahead=plain_left > 0, has_prompts=True)
    assert len(planned) == drafts


def test_a_dip_between_two_sequences_keeps_the_load() -> None:
    """When a sequence ends, there is one less for a step, also at the edge of a load."""
    trials = DraftTrials(most_sequences=64)
    loads = []
    for sequences in (32, 31, 32, 30, 32, 27, 31, 27, 32, 36):
        trials.mode(sequences)
        loads.append(trials.load)
    assert len(set(loads[:5])) == 1 and loads[5] != loads[0]
    assert len(set(loads[5:9])) == 1 and loads[9] == loads[0]


def test_late_output_is_learned_for_the_load_of_its_step() -> None:
    trials = DraftTrials(most_sequences=64)
    trials.mode(1)
    load = trials.load
    trials.mode(32)
    trials.observe_plain(7.0, load=load)
    assert list(trials._loads[load].plain) == [7.0] and not trials._loads[trials.load].plain


def test_steps_with_prompts_take_part_in_no_trial() -> None:
    trials = DraftTrials(most_sequences=8)
    assert [trials.mode(4, has_prompts=True) for _ in range(4)] == [Mode.OFF] * 4
    assert trials.pays, "the first trial is to find prompts computed"
    assert [trials.mode(4) for _ in range(3)] == [Mode.PLAIN, Mode.PLAIN, Mode.FIRST]
    assert trials.mode(4, has_prompts=True) is Mode.OFF
    for _ in range(trial_steps(4)):
        trials.observe_plain(1.0)
        trials.mode(4)
        trials.observe_drafted(1.0, expected=1.0, yielded=2.0, sequences=4)
    assert trials.mode(4, has_prompts=True) is Mode.ON


@pytest.mark.parametrize(
    ("yielded", "uses", "most_held"),
    [
        (2.0, True, 0.04),  # held again for a measurement after each 512 steps
        (1.0, False, 0.01),
    ],
)
def test_prompts_wait_for_trials_if_every_step_has_some(yielded: float, uses: bool, most_held: float) -> None:
    """Steps with prompts take 5 s, and those without 1 s, with drafts or without."""
    trials = DraftTrials(most_sequences=8)
    modes: list[Mode] = []
    held = whole = 0.0
    for _ in range(4_000):
        mode = trials.mode(4, has_prompts=True)
        modes.append(mode)
        whole += 1.0 if trials.holds_prompts else 5.0
        held += trials.holds_prompts
        if not trials.holds_prompts:
            trials.observe_prompts(0.0, drafted=mode is Mode.ON, whole=5.0)
        elif mode is Mode.PLAIN:
            trials.observe_plain(1.0)
        else:
            trials.observe_drafted(1.0, expected=1.0, yielded=yielded, sequences=4)
    first = modes.index(Mode.PLAIN)
    assert modes[:first] == [Mode.OFF] * 63
    assert modes[first : first + 3] == [Mode.PLAIN, Mode.PLAIN, Mode.FIRST]
    assert (modes[-1] is Mode.ON) is uses
    assert 0.0 < held / whole < most_held


def test_prompts_do_not_wait_without_a_sequence_that_decodes() -> None:
    trials = DraftTrials(most_sequences=8)
    for _ in range(200):
        assert trials.mode(4, has_prompts=True, decodes=False) is Mode.OFF
        assert not trials.holds_prompts


def test_prompts_wait_for_a_bounded_number_of_steps_without_drafts() -> None:
    """No sequence has a proposal, so that the trial finds no result."""
    trials = DraftTrials(most_sequences=8)
    held = []
    for _ in range(400):
        trials.mode(4, has_prompts=True)
        held.append(trials.holds_prompts)
    assert sum(held[:90]) == 12 and not any(held[75:138])


@pytest.mark.parametrize("seconds", [1.2, 5.0])
def test_prompts_seldom_wait_if_no_sequence_has_a_proposal(seconds: float) -> None:
    """Steps with prompts take ``seconds``, and those for which prompts wait 1 s."""
    trials = DraftTrials(most_sequences=8)
    held = whole = 0.0
    for _ in range(6_000):
        trials.mode(4, has_prompts=True)
        whole += 1.0 if trials.holds_prompts else seconds
        if trials.holds_prompts:
            held += 1.0
            trials.observe_plain(1.0)
        else:
            trials.observe_prompts(0.0, drafted=False, whole=seconds)
    assert 0.002 < held / whole < 0.015


def test_next_trial_waits_until_its_cost_is_saved() -> None:
    """A trial that loses three steps' time is repeated after some 300 steps that pay for it, and 300 that save for it.

    The next ones find as much saved.
    """
    trials = DraftTrials(most_sequences=64)
    begun, was_trial = [], False
    for step in range(4_000):
        mode = trials.mode(32)
        is_trial = mode in (Mode.FIRST, Mode.TRIAL)
        if is_trial:
            trials.observe_drafted(8 / 3, expected=8 / 3, yielded=1.0, sequences=32)
        else:
            trials.observe_plain(1.0)
        if is_trial and not was_trial:
            begun.append(step)
        was_trial = is_trial
    pauses = [later - earlier for earlier, later in itertools.pairwise(begun)]
    assert 300 < pauses[0] < 1_100 and all(300 < pause < 600 for pause in pauses[1:3])


@pytest.mark.parametrize(("sequences", "then"), [(1, Mode.TRIAL), (4, Mode.TRIAL), (16, Mode.OFF)])
def test_few_rejected_drafts_lead_to_a_trial_instead_of_a_pause(sequences: int, then: Mode) -> None:
    """One rejection turns the expected costs against all drafts; with many sequences it is many rejections."""
    trials = DraftTrials(most_sequences=64)
    while trials.mode(sequences) is Mode.PLAIN:
        trials.observe_plain(1.0)
    trials.observe_drafted(1.3, expected=1.3, yielded=1.0, sequences=sequences)
    assert trials.mode(sequences) is Mode.FIRST
    trials.refused(1.0)
    assert trials.mode(sequences) is then


def drafting(yielded: float = 2.0) -> DraftTrials:
    """Return trials of one sequence, after a first one in which a step with drafts took 1.25 times a plain one."""
    trials = DraftTrials(most_sequences=8)
    while trials.mode(1) is Mode.PLAIN:
        trials.observe_plain(1.0)
    for _ in range(trial_steps(1)):
        trials.observe_drafted(1.25, expected=1.25, yielded=yielded, sequences=1)
    return trials


def test_loads_rest_after_refusals_and_use_drafts_again() -> None:
    trials = drafting()
    rests = []
    for _ in range(8):
        assert trials.mode(1) is Mode.ON and trials.pays
        trials.refused(5.0)
        assert not trials.pays
        rest = 0
        while trials.is_paused(1):
            assert trials.passes(1)
            rest += 1
        rests.append(rest)
    assert rests == [2, 4, 8, 16, 32, 64, 64, 64]
    assert trials.mode(1) is Mode.ON
    trials.observe_drafted(1.25, expected=1.25, yielded=2.0, sequences=1)
    trials.refused(5.0)
    assert sum(trials.passes(1) for _ in range(10)) == 2


@pytest.mark.parametrize(
    ("first", "later", "steps", "uses"),
    [
        (1.3, 1.45, 10, True),  # the rate that it teaches permits more drafts
        (1.3, 1.3, 16, False),  # neither a gain nor a loss
        (1.2, 1.2, 8, False),
    ],
)
def test_trials_without_a_loss_last_up_to_twice_as_long(first: float, later: float, steps: int, uses: bool) -> None:
    trials, needed = drafting(first), trial_steps(1)
    while trials.mode(1) in (Mode.FIRST, Mode.TRIAL):
        needed += 1
        trials.observe_drafted(1.25, expected=1.25, yielded=later, sequences=1)
    assert (needed, trials.mode(1) is Mode.ON) == (steps, uses)


def test_prefill_by_the_draft_model_counts_against_drafts() -> None:
    trials = DraftTrials(most_sequences=8)
    modes = []
    for _ in range(40):
        modes.append(trials.mode(4))
        if modes[-1] in (Mode.OFF, Mode.PLAIN):
            trials.observe_plain(1.0)
        else:
            trials.observe_drafted(1.2, expected=1.0, yielded=1.5, sequences=4)
            trials.observe_prompts(0.5, drafted=False)
    assert Mode.ON in modes and modes[-1] is Mode.OFF


def test_expected_costs_decide_while_step_times_are_unmeasured() -> None:
    trials = DraftTrials(most_sequences=8)
    assert [trials.mode(4) for _ in range(4)] == [Mode.PLAIN, Mode.PLAIN, Mode.FIRST, Mode.FIRST]


@pytest.mark.parametrize(("loss", "pause"), [(0.0, 32), (1.0, 128), (3.0, 320)])
def test_drafts_refused_by_cost_get_a_trial_when_its_loss_is_saved(loss: float, pause: int) -> None:
    trials = DraftTrials(most_sequences=8)
    while trials.mode(4) is not Mode.FIRST:
        trials.observe_plain(1.0)
    trials.refused(loss)
    modes = []
    while not modes or modes[-1] is Mode.OFF:
        modes.append(trials.mode(4))
        trials.observe_plain(1.0)
    assert modes == [Mode.OFF] * pause + [Mode.TRIAL]


def test_steps_amid_a_pause_pass_and_pay_off_lost_time() -> None:
    trials = DraftTrials(most_sequences=8)
    while trials.mode(4) is not Mode.FIRST:
        trials.observe_plain(1.0)
    trials.refused(1.0)
    assert trials.mode(4) is Mode.OFF and not trials.pays
    assert not trials.passes(5), "another number of sequences may be another load"
    passed = planned = 0
    while True:
        if trials.passes(4):
            trials.observe_passed(1.0)
            passed += 1
        elif trials.mode(4) is Mode.OFF:
            trials.observe_plain(1.0)
            planned += 1
        else:
            break
    assert passed > 2 * planned and 100 <= passed + planned < 140


def test_prompts_are_computed_for_drafts_until_a_load_is_in_a_pause() -> None:
    trials = DraftTrials(most_sequences=64)
    while trials.mode(32) is not Mode.FIRST:
        trials.observe_plain(1.0)
    assert trials.pays
    trials.refused(1.0)
    trials.mode(4)
    assert not trials.pays, "drafts may pay with fewer sequences, but that is not known"


@pytest.mark.parametrize(("sequences", "steps"), [(1, 8), (2, 8), (4, 4), (8, 3), (500, 3)])
def test_trials_of_few_sequences_are_longer(sequences: int, steps: int) -> None:
    assert trial_steps(sequences) == steps


def step(seconds: float, yielded: float, expected: float = 1.0, beside: float = 0.0) -> DraftedStep:
    return DraftedStep(seconds=seconds, expected=expected, yielded=yielded, beside=beside)


@pytest.mark.parametrize(
    ("plain", "drafted", "expected"),
    [
        ([1.0], [step(1.0, 2.0)], 2.0),
        ([1.0, 9.0], [step(2.0, 3.0)], 1.5),  # an outlier among two
        ([1.0, 1.0, 50.0], [step(2.0, 3.0), step(80.0, 3.0), step(2.0, 3.0)], 1.5),
        ([1.0], [step(1.0, 1.0), step(3.0, 5.0, expected=3.0)], 1.5),  # steps with more drafts take longer
        ([1.0], [step(1.0, 2.0, beside=1.0)], 1.0),
    ],
)
def test_gain_is_robust_to_outliers(plain: list[float], drafted: list[DraftedStep], expected: float) -> None:
    assert gain(plain, drafted) == pytest.approx(expected)


@pytest.mark.parametrize(("values", "expected"), [([3.0], 3.0), ([2.0, 1.0], 1.0), ([5, 4, 3, 2, 1], 2)])
def test_low_quantile_is_the_lower_third(values: list[float], expected: float) -> None:
    assert low_quantile(values) == expected
