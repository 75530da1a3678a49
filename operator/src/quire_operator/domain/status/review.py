"""The review of an LLMDeployment before it is stored: problems and warnings. Pure.

``admission`` creates it and also sends the children to the API server. Without the webhook, the same problems show
later in the condition Ready with reason InvalidSpec.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from quire_operator.domain.resource import Spec
from quire_operator.domain.resource.fields import Problem
from quire_operator.domain.resource.model import AccessMode

JSON = Mapping[str, object]


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
    metadata = new.get("metadata")
    if isinstance(metadata, Mapping) and metadata.get("deletionTimestamp"):
        return True
    return old is not None and old.get("spec") == new.get("spec")


def spec_warnings(spec: Spec) -> tuple[str, ...]:
    """Return what is valid but probably not intended, with the field first."""
    warning = cache_warning(spec)
    return () if warning is None else (warning,)


def cache_warning(spec: Spec) -> str | None:
    """Return why several replicas may be unable to mount the model's cache, or None.

    This is no error: on a cluster with one node, all replicas can mount a ReadWriteOnce volume.
    """
    cache = spec.model.cache
    most = spec.max_replicas
    if cache is None or not cache.is_created or cache.access_mode is not AccessMode.READ_WRITE_ONCE or most < 2:
        return None
    return (
        f"spec.model.cache.accessMode: a ReadWriteOnce volume can be mounted on one node only, but up to {most} "
        "replicas may run: those on other nodes never start. Set ReadWriteMany, or keep all replicas on one node"
    )
