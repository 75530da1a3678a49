"""The choice of steps with drafts: only where a trial showed that they yield more tokens per second than steps without.

The expected costs of steps decide how many drafts would be best, but they are estimates of a few noisy times, and leave
out what is not a step's own time. So each load, which is a range of numbers of running sequences, compares what was
measured:

    gain = tokens per sequence x seconds of a step without drafts / seconds of a step with drafts

A load begins with steps without drafts, then has a trial of a few steps with drafts. Drafts stay while the gain is at
least ``_STOP``, and need ``_START`` to begin. After a trial without success, the next one waits for a number of steps
that doubles with each failure, and until the time that drafts have lost, and that the next trial will lose if it fails
like the last one, is at most ``_LOST_SHARE`` of all decoding. If the expected costs were against drafts, so that there
was no trial, the first one waits until what it will lose by these costs is saved. While a load waits, its steps cost
nothing but a count.

Steps with prompts take part in no trial: their times say nothing, so that a trial of such steps would never end. Under
a load in which every step has prompts, prompts therefore wait for the few steps of a trial. These steps' whole time
counts as lost.

Times of steps have outliers upwards. So a low quantile stands for them, for steps with drafts relative to the expected
time, because these differ in their numbers of drafts.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum, auto

from quire_engine.core.speculation.step_curve import bounds, knot

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
_FIRST_PAUSE, _LONGEST_PAUSE = 32, 2048
"""The steps between trials."""
_MEASURED = 8
"""The last steps of a pause, which are measured, so that the trial after it is compared with recent times."""
_LASTING = 64
"""The steps with drafts after which a success forgets the failures before it."""
_FIRST_REST, _LONGEST_REST = 2, 64
"""The steps without drafts after a refusal while drafts are used: the present sequences are hard to predict, but the
next one may not be. They double until a step has drafts. A look costs time, too."""
_LOST_SHARE = 0.01
_LARGEST_LOSS = 16.0
"""The most that one step counts as lost, as a multiple of the expected time of the step. The first step of a trial also
computes what the draft model has missed of every sequence."""
_TOLERANCE = 0.125
"""The share by which the number of sequences may leave a load's range without a change of the load: between the end of
a sequence and the start of the next one, there is one less for a step."""
_CROWDED_STEPS, _CROWDED_STEPS_IN_USE, _HELD_STEPS = 64, 512, 12
"""The steps with prompts in a row after which prompts wait for a trial, or for a measurement while drafts are used; and
the most steps for which they wait: those without drafts and those of the longest trial."""
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
        self.pause = _FIRST_PAUSE
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
        self.wait = self.pause if failed else _FIRST_PAUSE
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
                self.pause = _FIRST_PAUSE
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


class DraftTrials:
    """The kind of each step, by the number of running sequences.

    A step with drafts is committed before the next one is planned; other steps may be committed later.
    """

    __slots__ = (
        "_beside",
        "_loads",
        "_lost",
        "_most_saved",
        "_passed",
        "_place",
        "_sequences",
        "_unmeasured",
        "any_paused",
        "holds_prompts",
    )

    def __init__(self, *, most_sequences: int) -> None:
        self._loads = [_Load() for _ in range(knot(most_sequences) + 1)]
        self._place = self._sequences = 0
        """The load of the step that was planned last, and its number of sequences."""
        self.any_paused = False
        """True if a load is in a pause."""
        self.holds_prompts = False
        """True if a step that ``mode`` was asked about with prompts is to leave them out."""
        self._lost = 0.0
        """The seconds that drafts have lost, minus the tolerated share of all seconds. Negative ones are saved for the
        next trial, as many as the dearest one of all loads has lost."""
        self._most_saved = 0.0
        self._passed = 0.0
        """The seconds of steps amid pauses that have not paid off lost time yet."""
        self._beside, self._unmeasured = 0.0, 0
        """The seconds in which prompts were computed for drafts since the last measured step with drafts, and the steps
        with drafts whose times were not measured meanwhile."""

    @property
    def load(self) -> int:
        """The number of the load of the step that was planned last, which ``observe_plain`` and others need."""
        return self._place

    @property
    def pays(self) -> bool:
        """True if prompts should be computed for drafts: if these are used, or nothing is known of any load yet."""
        load = self._loads[self._place]
        return load.wait is None and (load.uses or not (self.any_paused or load.forced))

    def _place_of(self, sequences: int) -> int:
        """Return the load of a number of sequences, which is the present one if it is almost in its range."""
        place = self._place
        if sequences == self._sequences:
            return place
        first, end = bounds(place)
        if first * (1.0 - _TOLERANCE) <= sequences < end * (1.0 + _TOLERANCE):
            return place
        return min(knot(max(1, sequences)), len(self._loads) - 1)

    def is_paused(self, sequences: int) -> bool:
        """Return whether the next step has no drafts and decides nothing. The state does not change."""
        load = self._loads[self._place_of(sequences)]
        return load.wait is not None and (load.wait > 0 or not self._affords(load))

    def may_draft(self, sequences: int) -> bool:
        """Return whether the next step may have drafts. The state does not change."""
        return not self.is_paused(sequences) and not self._loads[self._place_of(sequences)].plain_left

    def _affords(self, load: _Load) -> bool:
        return load.uses or self._lost + load.cost <= 0.0

    def passes(self, sequences: int) -> bool:
        """Return True, and count the step, if it is amid a pause, with as many sequences as the last.

        It has no drafts then, and is not measured: call ``observe_passed`` after it. If False, ``mode`` says its kind.
        """
        load = self._loads[self._place]
        if not load.wait or sequences != self._sequences or (load.wait <= _MEASURED and not load.uses):
            return False
        load.wait -= 1
        self.holds_prompts = False
        return True

    def mode(self, sequences: int, *, has_prompts: bool = False, decodes: bool = True) -> Mode:
        """Return the kind of the next step, which has ``sequences`` running sequences, at least 1.

        ``decodes`` says that a step without its prompts would compute some of them; see ``holds_prompts``.
        """
        self._place, self._sequences = self._place_of(sequences), sequences
        load = self._loads[self._place]
        if load.wait is not None and (load.wait > 0 or not self._affords(load)):
            load.wait = (load.wait or _FIRST_PAUSE) - 1
            self.holds_prompts = False
            return Mode.OFF
        if has_prompts:
            # A trial in which no sequence has a proposal does not end: what the last wait lost delays the next one.
            self.holds_prompts = decodes and load.hold(is_paid=self._affords(load))
            if not self.holds_prompts:
                return Mode.ON if load.uses else Mode.OFF
        else:
            self.holds_prompts = False
            load.crowded = 0
        if load.wait is not None:
            load.begin()
        if load.plain_left:
            load.plain_left -= 1
            return Mode.PLAIN
        if load.uses:
            return Mode.ON
        return Mode.TRIAL if load.forced else Mode.FIRST

    def hasten(self) -> None:
        """Shorten a long pause, because drafts look good again; the limit on lost time still holds."""
        load = self._loads[self._place]
        if load.wait is not None:
            load.wait = min(load.wait, _FIRST_PAUSE)

    def refused(self, loss: float) -> None:
        """Note that a step with candidates has no drafts, because the expected costs were against all of them.

        ``loss`` is what a trial loses by these costs, as a multiple of the time of a step without drafts.
        """
        load = self._loads[self._place]
        if load.wait is not None:
            return
        if load.is_undecided:
            load.begin_trial()
        elif not load.uses:
            load.end(failed=False)
            if load.plain:
                load.cost = max(load.cost, loss * low_quantile(load.plain))
            self._note_ends()
        else:
            load.begin_rest()

    def observe_prompts(self, seconds: float, *, drafted: bool, whole: float = 0.0) -> None:
        """Note the seconds in which a step computed prompts for drafts, and whether it had drafts, too.

        ``whole`` is the time of the step.
        """
        self._beside += seconds
        self._unmeasured += drafted
        self._pay_off(whole)

    def observe_passed(self, seconds: float) -> None:
        """Note the time of a step amid a pause."""
        self._passed += seconds

    def observe_plain(self, seconds: float, *, load: int | None = None) -> None:
        """Learn the time of a step without drafts and without prompts; ``load`` is that of the last one if None."""
        own = self._loads[self._place if load is None else load]
        own.plain.append(seconds)
        self._count_held(own, seconds)
        self._pay_off(seconds)

    def observe_drafted(
        self, seconds: float, *, expected: float, yielded: float, sequences: int, load: int | None = None
    ) -> None:
        """Learn from a step with drafts and without prompts, see ``DraftedStep``, of ``sequences`` sequences."""
        own = self._loads[self._place if load is None else load]
        # Prompts that are computed while nothing is known yet would let every first trial fail.
        beside = self._beside / (1 + self._unmeasured) if own.uses else 0.0
        self._beside, self._unmeasured = 0.0, 0
        step = DraftedStep(seconds=seconds, expected=expected, yielded=yielded, beside=beside)
        own.drafted.append(step)
        if own.plain:
            spent = min(seconds, _LARGEST_LOSS * expected) + beside
            loss = spent - yielded * low_quantile(own.plain)
            own.loss += loss
            self._lost = self._bounded(self._lost + loss)
        self._count_held(own, seconds)
        self._pay_off(seconds)
        if own.wait is None:
            own.judge(sequences)
            if own.wait is not None or own.uses:
                self._note_ends()

    def _note_ends(self) -> None:
        """Note that a trial has ended, or the use of drafts."""
        self._most_saved = max(each.cost for each in self._loads)
        self.any_paused = any(each.is_paused for each in self._loads)

    def _count_held(self, load: _Load, seconds: float) -> None:
        """Count the time of a step as lost if prompts waited for it."""
        if self.holds_prompts:
            load.loss += seconds
            self._lost = self._bounded(self._lost + seconds)

    def _pay_off(self, seconds: float) -> None:
        self._lost = self._bounded(self._lost - _LOST_SHARE * (seconds + self._passed))
        self._passed = 0.0

    def _bounded(self, lost: float) -> float:
        return max(lost, -self._most_saved)
