"""What is said to whoever writes an LLMDeployment, before it is stored: pure.

Made by ``admission``, which asks the API server as well. Whatever is refused here is also refused without a webhook, by
the condition Ready with reason InvalidSpec; here it is said sooner.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from quire_operator.domain.resource.fields import Problem

JSON = Mapping[str, object]


@dataclass(frozen=True, slots=True, kw_only=True)
class Review:
    """Refused if there are problems; warnings are shown either way."""

    problems: tuple[Problem, ...] = ()
    warnings: tuple[str, ...] = ()

    @property
    def message(self) -> str:
        """All problems, a line each where there are several."""
        if len(self.problems) == 1:
            return str(self.problems[0])
        return "\n".join((f"{len(self.problems)} problems:", *(f"  - {problem}" for problem in self.problems)))


ALLOWED = Review()


def asks_for_nothing(new: JSON, old: JSON | None) -> bool:
    """Whether a write leaves the spec as it was, or the object goes: what is stored already must stay changeable.

    Else a label, a finalizer or the deletion of an object that an older version accepted could never be written.
    """
    metadata = new.get("metadata")
    if isinstance(metadata, Mapping) and metadata.get("deletionTimestamp"):
        return True
    return old is not None and old.get("spec") == new.get("spec")
