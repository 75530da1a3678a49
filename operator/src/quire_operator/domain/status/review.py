"""What is said to whoever writes an LLMDeployment, before it is stored: pure.

Made by ``admission``, which asks the API server as well. Whatever is refused here is also refused without a webhook, by
the condition Ready with reason InvalidSpec; here it is said sooner.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from quire_operator.domain.resource import NewClaim, Spec
from quire_operator.domain.resource.fields import Problem
from quire_operator.domain.resource.model import AccessMode

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


def spec_warnings(spec: Spec) -> tuple[str, ...]:
    """Return what is valid and yet likely to disappoint, with the field first."""
    warning = cache_warning(spec)
    return () if warning is None else (warning,)


def cache_warning(spec: Spec) -> str | None:
    """Return why several replicas may not be able to mount the model's cache; None if they can.

    This is no error: on a cluster with one node, all replicas can mount a ReadWriteOnce volume.
    """
    cache = spec.model.cache
    most = spec.max_replicas
    if not isinstance(cache, NewClaim) or cache.access_mode is not AccessMode.READ_WRITE_ONCE or most < 2:
        return None
    return (
        f"spec.model.cache.accessMode: a ReadWriteOnce volume can be mounted on one node only, but up to {most} "
        "replicas may run: those on other nodes never start. Set ReadWriteMany, or keep all replicas on one node"
    )
