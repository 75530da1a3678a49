"""The review of an LLMDeployment before it is stored: problems and warnings. Pure.

``admission`` creates it and also sends the children to the API server. Without the webhook, the same problems show
later in the condition Ready with reason InvalidSpec.
"""

from dataclasses import dataclass

from quire_operator.domain.resource.fields import Problem
from quire_operator.domain.resource.untyped import JSON, section_of


@dataclass(frozen=True, slots=True, kw_only=True)
class Review:
    """The result of a review: the object is rejected if there are problems; warnings are shown either way."""

    problems: tuple[Problem, ...] = ()
    warnings: tuple[str, ...] = ()

    @property
    def message(self) -> str:
        """All problems, one per line if there are several."""
        if len(self.problems) == 1:
            return str(self.problems[0])
        return "\n".join((f"{len(self.problems)} problems:", *(f"  - {problem}" for problem in self.problems)))


ALLOWED = Review()


def asks_for_nothing(new: JSON, old: JSON | None) -> bool:
    """Return True if a write does not change the spec or deletes the object.

    Such writes are always allowed. Otherwise an object that an older version accepted could not be labelled or deleted.
    """
    if section_of(new, "metadata").get("deletionTimestamp"):
        return True
    return old is not None and old.get("spec") == new.get("spec")
