"""The choice of steps with drafts: only where a trial showed that they yield more tokens per second than steps without.

The expected costs of steps decide how many drafts would be best, but they are estimates of a few noisy times, and leave
out what is not a step's own time. So each load, which is a range of numbers of running sequences, compares what was
measured:

    gain = tokens per sequence x seconds of a step without drafts / seconds of a step with drafts

A load begins with steps without drafts, then has a trial of a few steps with drafts. Drafts stay while the gain is at
least ``_STOP``, and need ``_START`` to begin. After a trial without success, the next one waits for a number of steps
that doubles with each failure, and until the time that drafts have lost is at most ``_LOST_SHARE`` of all decoding.
While a load waits, its steps cost nothing but a count.

Times of steps have outliers upwards. So a low quantile stands for them, for steps with drafts relative to the expected
time, because these differ in their numbers of drafts.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum, auto

from quire_engine.core.speculation.step_curve import knot

_START, _STOP = 1.08, 1.03
"""The gain of a trial from which on drafts are used, and the least one with which they stay. Their scheduling is not in
the times, and takes some hundredths of a small model's step."""
_HOPELESS = 0.95
"""The gain below which a trial ends before its last step, from the second one on."""
_FEWEST_TRIAL_STEPS, _MOST_TRIAL_STEPS, _TRIAL_SEQUENCES = 3, 8, 16
"""A trial has as many steps as verify the drafts of some 16 sequences in total, within these bounds."""
_LEAST_STEPS_TO_STOP = 8
_REMEMBERED_PLAIN, _REMEMBERED_DRAFTED = 5, 16
_FIRST_PAUSE, _LONGEST_PAUSE = 32, 2048
"""The steps between trials."""
_LASTING = 64
"""The steps with drafts after which a success forgets the failures before it."""
_MOST_REFUSALS = 4
_LOST_SHARE = 0.01
_LARGEST_LOSS = 3.0
"""The most that one step counts as lost, as a multiple of the expected time of the step."""
_FIRST_PLAIN_STEPS, _PLAIN_STEPS = 2, 3
_FIRST_DISTANCE, _LONGEST_DISTANCE = 32, 128
"""The steps without drafts that are measured at first and later, and the steps with drafts between such measurements.
The distances double."""


class Mode(Enum):
    """The kind of the next step."""

    OFF = auto()
    """Without drafts, and nothing is to be decided."""
    PLAIN = auto()
    """Without drafts, to measure its time."""
    FIRST = auto()
    """With drafts if the expected costs are clearly for them: nothing was measured yet."""
    TRIAL = auto()
    """With drafts, whatever the expected costs say."""
    ON = auto()
    """With the drafts that the expected costs are for."""


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


class _Load:
    """The measurements of one range of numbers of sequences, and what follows from them."""

    __slots__ = (
        "distance",
        "drafted",
        "forced",
        "pause",
        "plain",
        "plain_left",
        "refusals",
        "sequences",
        "steps",
        "uses",
        "wait",
    )

    def __init__(self) -> None:
        self.plain: deque[float] = deque(maxlen=_REMEMBERED_PLAIN)
        self.drafted: deque[DraftedStep] = deque(maxlen=_REMEMBERED_DRAFTED)
        self.wait: int | None = None
        """The steps until the next trial; None while there are drafts."""
        self.uses = False
        """True after a trial with success, False during a trial."""
        self.forced = False
        """True for a trial after a pause."""
        self.steps = 0
        """The measured steps with drafts since the trial began."""
        self.sequences = 0
        """The sequences of the last measured step with drafts."""
        self.refusals = 0
        self.pause = _FIRST_PAUSE
        self.plain_left, self.distance = _FIRST_PLAIN_STEPS, _FIRST_DISTANCE

    @property
    def is_undecided(self) -> bool:
        """True if the expected costs rest on a few drafts only: one rejection turns them against all drafts."""
        few = 0 < self.steps * self.sequences < _TRIAL_SEQUENCES
        return few and not self.uses and not self.forced

    def begin_trial(self) -> None:
        self.drafted.clear()
        self.wait, self.uses, self.forced, self.steps, self.refusals = None, False, True, 0, 0

    def end(self, *, failed: bool) -> None:
        """Do without drafts for a while, longer after each failure."""
        self.wait = self.pause if failed else _FIRST_PAUSE
        self.uses = False
        if failed:
            self.pause = min(2 * self.pause, _LONGEST_PAUSE)

    def judge(self, sequences: int) -> None:
        """Draw the conclusion from one more step with drafts."""
        self.steps += 1
        self.sequences = sequences
        self.refusals = 0
        if not self.plain:  # the steps that were to measure it had prompts
            self.plain_left = _PLAIN_STEPS
            return
        found = gain(self.plain, self.drafted)
        if self.uses:
            if self.steps == _LASTING:
                self.pause = _FIRST_PAUSE
            if len(self.drafted) >= _LEAST_STEPS_TO_STOP and found < _STOP:
                self.end(failed=True)
            elif self.steps % self.distance == 0:
                self.plain_left, self.distance = _PLAIN_STEPS, min(2 * self.distance, _LONGEST_DISTANCE)
        elif self.steps >= trial_steps(sequences):
            # The first steps had few drafts if the sequences' rates of acceptance were not known.
            late = list(self.drafted)[-max(_FEWEST_TRIAL_STEPS, self.steps // 2) :]
            if gain(self.plain, late) < _START:
                self.end(failed=True)
            else:
                self.uses = True
                self.drafted = deque(late, maxlen=_REMEMBERED_DRAFTED)
        elif self.steps > 1 and found < _HOPELESS:
            self.end(failed=True)


def trial_steps(sequences: int) -> int:
    """Return the number of steps of a trial: few sequences need more of them."""
    return min(max(-(-_TRIAL_SEQUENCES // sequences), _FEWEST_TRIAL_STEPS), _MOST_TRIAL_STEPS)


class DraftTrials:
    """The kind of each step, by the number of running sequences. Each step is committed before the next one."""

    __slots__ = ("_beside", "_load", "_loads", "_lost", "_unmeasured")

    def __init__(self, *, most_sequences: int) -> None:
        self._loads = [_Load() for _ in range(knot(most_sequences) + 1)]
        self._load = self._loads[0]
        self._lost = 0.0
        """The seconds that drafts have lost, minus the tolerated share of all seconds; never negative."""
        self._beside, self._unmeasured = 0.0, 0
        """The seconds in which prompts were computed for drafts since the last measured step with drafts, and the steps
        with drafts whose times were not measured meanwhile."""

    @property
    def pays(self) -> bool:
        """True if prompts should be computed for drafts: not in a pause, nor in the trial after one."""
        load = self._load
        return load.wait is None and (load.uses or not load.forced)

    def mode(self, sequences: int) -> Mode:
        """Return the kind of the next step, which has ``sequences`` running sequences, at least 1."""
        load = self._load = self._loads[min(knot(sequences), len(self._loads) - 1)]
        if load.wait is not None:
            if load.wait > 0:
                load.wait -= 1
                return Mode.OFF
            if self._lost > 0.0:
                return Mode.OFF
            load.begin_trial()
        if load.plain_left:
            load.plain_left -= 1
            return Mode.PLAIN
        if load.uses:
            return Mode.ON
        return Mode.TRIAL if load.forced else Mode.FIRST

    def hasten(self) -> None:
        """Shorten a long pause, because drafts look good again; the limit on lost time still holds."""
        if self._load.wait is not None:
            self._load.wait = min(self._load.wait, _FIRST_PAUSE)

    def refused(self) -> None:
        """Note that a step with candidates has no drafts, because the expected costs were against all of them."""
        load = self._load
        load.refusals += 1
        if load.wait is not None:
            return
        if load.is_undecided:
            load.begin_trial()
        elif not load.uses or load.refusals >= _MOST_REFUSALS:
            load.end(failed=False)

    def observe_prompts(self, seconds: float, *, drafted: bool) -> None:
        """Note the seconds in which a step computed prompts for drafts, and whether it had drafts, too."""
        self._beside += seconds
        self._unmeasured += drafted

    def observe_plain(self, seconds: float) -> None:
        """Learn the time of a step without drafts and without prompts."""
        self._load.plain.append(seconds)
        self._pay_off(seconds)

    def observe_drafted(self, seconds: float, *, expected: float, yielded: float, sequences: int) -> None:
        """Learn from a step with drafts and without prompts, see ``DraftedStep``, of ``sequences`` sequences."""
        load = self._load
        # Prompts that are computed while nothing is known yet would let every first trial fail.
        beside = self._beside / (1 + self._unmeasured) if load.uses else 0.0
        self._beside, self._unmeasured = 0.0, 0
        step = DraftedStep(seconds=seconds, expected=expected, yielded=yielded, beside=beside)
        load.drafted.append(step)
        if load.plain:
            spent = min(seconds, _LARGEST_LOSS * expected) + beside
            self._lost = max(0.0, self._lost + spent - yielded * low_quantile(load.plain))
        self._pay_off(seconds)
        if load.wait is None:
            load.judge(sequences)

    def _pay_off(self, seconds: float) -> None:
        if self._lost:
            self._lost = max(0.0, self._lost - _LOST_SHARE * seconds)
