"""Speculation without trials: every step has the drafts that a test wants, whatever they cost."""

from dataclasses import dataclass

from quire_engine.core.speculation.speculation import Speculation
from quire_engine.core.speculation.trials import Mode


@dataclass(slots=True)
class FixedTrials:
    """In place of ``DraftTrials``: the kind of a step does not depend on what was measured."""

    fixed: Mode = Mode.ON
    pays: bool = True
    load: int = 0
    any_paused: bool = False
    holds_prompts: bool = False

    def passes(self, sequences: int) -> bool:
        return False

    def is_paused(self, sequences: int) -> bool:
        return self.fixed is Mode.OFF

    def may_draft(self, sequences: int) -> bool:
        return self.fixed not in (Mode.OFF, Mode.PLAIN)

    def mode(self, sequences: int, *, has_prompts: bool = False, decodes: bool = True) -> Mode:
        return self.fixed

    def observe_plain(self, *_: object, **__: object) -> None:
        pass

    observe_drafted = observe_prompts = observe_plain

    def refused(self, loss: float) -> None:
        pass

    def hasten(self) -> None:
        pass


def use_every_draft(speculation: Speculation | None) -> None:
    """Let the speculation verify every draft for which there is room, whatever it costs."""
    assert speculation is not None
    speculation._choose = lambda candidates, mode, *, others: [len(one.proposal) for one in candidates]  # type: ignore[method-assign]
    speculation._trials = FixedTrials()  # type: ignore[assignment]
    speculation.observe_step = speculation.observe_prompts = lambda *_, **__: None  # type: ignore[method-assign]


@dataclass(slots=True)
class AlternatingTrials(FixedTrials):
    """Drafts in ``drafted`` steps, then none in ``plain`` ones, and so on."""

    drafted: int = 2
    plain: int = 5
    _planned: int = 0

    @property
    def _drafts(self) -> bool:
        return self._planned % (self.drafted + self.plain) < self.drafted

    def is_paused(self, sequences: int) -> bool:
        return not self._drafts

    def may_draft(self, sequences: int) -> bool:
        return self._drafts

    def mode(self, sequences: int, *, has_prompts: bool = False, decodes: bool = True) -> Mode:
        mode = Mode.ON if self._drafts else Mode.OFF
        self._planned += 1
        self.pays = mode is Mode.ON
        return mode
