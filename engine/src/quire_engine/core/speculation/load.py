"""The measurements of one load, which is a range of numbers of running sequences, and what follows from them.

Times of steps have outliers upwards. So a low quantile stands for them, for steps with drafts relative to the expected
time, because these differ in their numbers of drafts.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

_START, _STOP = 1.08, 1.03
"""The gain of a trial from which on drafts are used, and the least one with which they stay. Their scheduling is not in
the times, and takes some hundredths of a small model's step."""
_HOPELESS = 0.95
"""The gain below which a trial ends before its last step, from the second one on."""
_LEAST_TO_DESPAIR = 4
"""The fewest sequences with drafts, in total, after which it may: the first draft after a prompt is often wrong."""
_FEWEST_TRIAL_STEPS, _MOST_TRIAL_STEPS, _TRIAL_SEQUENCES = 3, 8, 16
"""A trial has as many steps as verify the drafts of some 16 sequences in total, within these bounds."""
_LONGEST_TRIAL = 2
"""A trial that neither gains enough nor loses goes on until it is so many times as long: it teaches acceptance rates,
and higher ones permit more drafts."""
_LEAST_STEPS_TO_STOP = 8
_REMEMBERED_PLAIN, _REMEMBERED_DRAFTED = 5, 16
FIRST_PAUSE, _LONGEST_PAUSE = 32, 2048
"""The steps between trials."""
_LASTING = 64
"""The steps with drafts after which a success forgets the failures before it."""
_FIRST_REST, _LONGEST_REST = 2, 64
"""The steps without drafts after a refusal while drafts are used: the present sequences are hard to predict, but the
next one may not be. They double until a step has drafts. A look costs time, too."""
_CROWDED_STEPS, _CROWDED_STEPS_IN_USE, _HELD_STEPS = 64, 512, 12
"""The steps with prompts in a row after which prompts wait for a trial, or for a measurement while drafts are used; and
the most steps for which they wait: those without drafts and those of the longest trial."""
_FIRST_PLAIN_STEPS, _PLAIN_STEPS = 2, 3
_FIRST_DISTANCE, _LONGEST_DISTANCE = 32, 128
"""The steps without drafts that are measured at first and later, and the steps with drafts between such measurements.
The distances double."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftedStep:
    """A step with drafts and without prompts."""

    seconds: float
    expected: float
    """The time that the learned costs expected."""
    yielded: float
    """The tokens that a sequence gained on average."""
    beside: float = 0.0
    """Its share of the seconds in which prompts were computed for drafts."""


def gain(plain: Sequence[float], drafted: Sequence[DraftedStep]) -> float:
    """Return the tokens per second with drafts relative to those without, given the measured times of both."""
    relative = low_quantile([step.seconds / step.expected for step in drafted])
    seconds = relative * sum(step.expected for step in drafted) + sum(step.beside for step in drafted)
    return low_quantile(plain) * sum(step.yielded for step in drafted) / seconds


def low_quantile(values: Sequence[float]) -> float:
    """Return the value below which a third of the others are."""
    return sorted(values)[len(values) // 3]


class Load:
    """The measurements of one range of numbers of sequences, and what follows from them."""

    __slots__ = (
        "cost",
        "crowded",
        "distance",
        "drafted",
        "forced",
        "held_left",
        "loss",
        "pause",
        "plain",
        "plain_left",
        "rest",
        "sequences",
        "steps",
        "uses",
        "wait",
    )

    def __init__(self) -> None:
        self.plain: deque[float] = deque(maxlen=_REMEMBERED_PLAIN)
        self.drafted: deque[DraftedStep] = deque(maxlen=_REMEMBERED_DRAFTED)
        self.wait: int | None = None
        """The steps until the next trial, or until drafts are used again; None while there are drafts."""
        self.uses = False
        """True after a trial with success, False during a trial."""
        self.rest = _FIRST_REST
        self.forced = False
        """True for a trial after a pause."""
        self.steps = 0
        """The measured steps with drafts since the trial began."""
        self.sequences = 0
        """The sequences of the last measured step with drafts."""
        self.loss = 0.0
        """The seconds that drafts have lost since the trial began."""
        self.cost = 0.0
        """The seconds that the next trial probably loses: as the last one did, or by the expected costs; 0 if that was
        a success or too small."""
        self.pause = FIRST_PAUSE
        self.crowded = self.held_left = 0
        """The steps with prompts in a row that were not measured, and the steps for which prompts still wait."""
        self.plain_left, self.distance = _FIRST_PLAIN_STEPS, _FIRST_DISTANCE

    @property
    def is_undecided(self) -> bool:
        """True if the expected costs rest on a few drafts only: one rejection turns them against all drafts."""
        few = 0 < self.steps * self.sequences < _TRIAL_SEQUENCES
        return few and not self.uses and not self.forced

    def begin_trial(self) -> None:
        self.drafted.clear()
        self.wait, self.uses, self.forced, self.steps, self.loss = None, False, True, 0, 0.0

    @property
    def is_paused(self) -> bool:
        """True if it waits for a trial."""
        return self.wait is not None and not self.uses

    def begin(self) -> None:
        """Use drafts again after a rest, or begin the trial after a pause."""
        if self.uses:
            self.wait = None
        else:
            self.begin_trial()

    def begin_rest(self) -> None:
        """Do without drafts for a few steps."""
        self.wait, self.held_left = self.rest, 0
        self.rest = min(2 * self.rest, _LONGEST_REST)

    def end(self, *, failed: bool) -> None:
        """Do without drafts for a while, longer after each failure."""
        self.wait = self.pause if failed else FIRST_PAUSE
        self.held_left = 0
        if failed and not self.uses:
            self.cost = max(0.0, self.loss)
        self.uses = False
        if failed:
            self.pause = min(2 * self.pause, _LONGEST_PAUSE)

    def hold(self, *, is_paid: bool) -> bool:
        """Return whether prompts wait for the next step, so that it can be measured.

        ``is_paid`` says that the time lost before is paid off. While drafts are used, this is not needed.
        """
        if not self.held_left:
            self.crowded += 1
            if self.crowded < (_CROWDED_STEPS_IN_USE if self.uses else _CROWDED_STEPS) or not (self.uses or is_paid):
                return False
            self.crowded, self.held_left = 0, _HELD_STEPS
            if self.uses:
                self.drafted.clear()
                self.plain_left = _PLAIN_STEPS
        self.held_left -= 1
        return True

    def judge(self, sequences: int) -> None:
        """Draw the conclusion from one more step with drafts."""
        self.steps += 1
        self.sequences = sequences
        self.rest = _FIRST_REST
        if not self.plain:  # the steps that were to measure it had prompts
            self.plain_left = _PLAIN_STEPS
            return
        found = gain(self.plain, self.drafted)
        if self.uses:
            if self.steps == _LASTING:
                self.pause = FIRST_PAUSE
            if len(self.drafted) >= _LEAST_STEPS_TO_STOP and found < _STOP:
                self.end(failed=True)
            elif self.steps % self.distance == 0:
                self.plain_left, self.distance = _PLAIN_STEPS, min(2 * self.distance, _LONGEST_DISTANCE)
        elif self.steps >= trial_steps(sequences):
            # The first steps had few drafts if the sequences' rates of acceptance were not known.
            late = list(self.drafted)[-max(_FEWEST_TRIAL_STEPS, self.steps // 2) :]
            found = gain(self.plain, late)
            if found >= _START:
                self.uses, self.cost, self.held_left = True, 0.0, 0
                self.drafted = deque(late, maxlen=_REMEMBERED_DRAFTED)
            elif found < 1.0 or self.steps >= _LONGEST_TRIAL * trial_steps(sequences):
                self.end(failed=True)
        elif self.steps > 1 and self.steps * sequences >= _LEAST_TO_DESPAIR and found < _HOPELESS:
            self.end(failed=True)


def trial_steps(sequences: int) -> int:
    """Return the number of steps of a trial: few sequences need more of them."""
    return min(max(-(-_TRIAL_SEQUENCES // sequences), _FEWEST_TRIAL_STEPS), _MOST_TRIAL_STEPS)
