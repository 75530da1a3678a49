"""The choice of steps with drafts: only where a trial showed that they yield more tokens per second than steps without.

The expected costs of steps decide how many drafts would be best, but they are estimates of a few noisy times, and leave
out what is not a step's own time. So each load, which is a range of numbers of running sequences, compares what was
measured:

    gain = tokens per sequence x seconds of a step without drafts / seconds of a step with drafts

A load begins with steps without drafts, then has a trial of a few steps with drafts. Drafts stay while the gain is at
least 1.03, and need 1.08 to begin. After a trial without success, the next one waits for a number of steps
that doubles with each failure, and until the time that drafts have lost, and that the next trial will lose if it fails
like the last one, is at most ``_LOST_SHARE`` of all decoding. If the expected costs were against drafts, so that there
was no trial, the first one waits until what it will lose by these costs is saved. While a load waits, its steps cost
nothing but a count.

Steps with prompts take part in no trial: their times say nothing, so that a trial of such steps would never end. Under
a load in which every step has prompts, prompts therefore wait for the few steps of a trial. These steps' whole time
counts as lost.
"""

from enum import Enum, auto

from quire_engine.core.speculation.load import FIRST_PAUSE, DraftedStep, Load, low_quantile
from quire_engine.core.speculation.step_curve import bounds, knot

_MEASURED = 8
"""The last steps of a pause, which are measured, so that the trial after it is compared with recent times."""
_LOST_SHARE = 0.01
_MOST_EARNED = 32
"""Drafts may save up the time of this many steps without drafts, which later trials may lose. Sequences that are hard
to predict would otherwise keep the next ones from drafts for hundreds of steps."""
_LARGEST_LOSS = 16.0
"""The most that one step counts as lost, as a multiple of the expected time of the step. The first step of a trial also
computes what the draft model has missed of every sequence."""
_TOLERANCE = 0.125
"""The share by which the number of sequences may leave a load's range without a change of the load: between the end of
a sequence and the start of the next one, there is one less for a step."""


class Mode(Enum):
    """The kind of the next step."""

    OFF = auto()
    """Without drafts, and nothing is to be decided."""
    PLAIN = auto()
    """Without drafts, to measure its time."""
    FIRST = auto()
    """With drafts if the expected costs are clearly for them, or few sequences run: nothing was measured yet."""
    TRIAL = auto()
    """With drafts, whatever the expected costs say."""
    ON = auto()
    """With the drafts that the expected costs are for."""


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
        self._loads = [Load() for _ in range(knot(most_sequences) + 1)]
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

    def _affords(self, load: Load) -> bool:
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
            load.wait = (load.wait or FIRST_PAUSE) - 1
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
            load.wait = min(load.wait, FIRST_PAUSE)

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
            most = max(self._most_saved, _MOST_EARNED * low_quantile(own.plain))
            self._lost = max(self._lost + loss, min(self._lost, -most))
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

    def _count_held(self, load: Load, seconds: float) -> None:
        """Count the time of a step as lost if prompts waited for it."""
        if self.holds_prompts:
            load.loss += seconds
            self._lost += seconds

    def _pay_off(self, seconds: float) -> None:
        paid = self._lost - _LOST_SHARE * (seconds + self._passed)
        self._lost = max(paid, min(self._lost, -self._most_saved))
        self._passed = 0.0
