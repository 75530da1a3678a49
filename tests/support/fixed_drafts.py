"""Speculation whose drafts do not depend on what was measured: every one for which there is room, in some steps."""

from collections.abc import Sequence
from dataclasses import dataclass

from quire_engine.core.speculation.speculation import Speculation


@dataclass(slots=True)
class FixedDrafts:
    """In place of ``DraftPolicy``: drafts in ``drafted`` steps, then none in ``plain`` ones, and so on."""

    most: int
    drafted: int = 2
    plain: int = 0
    pauses: bool = False
    """True leaves all further steps without drafts."""
    _planned: int = 0
    prepares: bool = True

    def excludes_drafts(self, sequences: int) -> bool:
        return self.pauses or self._planned % (self.drafted + self.plain) >= self.drafted

    def begin_step(self, sequences: int) -> bool:
        self.prepares = not self.excludes_drafts(sequences)
        self._planned += 1
        return self.prepares

    def choose(self, rates: Sequence[float], proposed: Sequence[int], *, others: int) -> list[int]:
        left, lengths = self.most, []
        for length in proposed:
            lengths.append(min(length, left))
            left -= lengths[-1]
        return lengths

    def sequence_ended(self) -> None:
        pass

    def observe_step(self, *_: object, **__: object) -> None:
        pass

    observe_prompts = observe_step


def use_every_draft(speculation: Speculation | None, *, plain: int = 0) -> FixedDrafts:
    """Let the speculation verify every draft for which there is room, in two steps before each ``plain`` ones."""
    assert speculation is not None
    fixed = FixedDrafts(speculation._policy._most_drafts, plain=plain)
    speculation._policy = fixed  # type: ignore[assignment]
    return fixed
