"""The review of a new or changed LLMDeployment or LLMAdapter, for the webhook.

It writes nothing. What cannot be checked in time, or what other objects may still change, is a warning and never a
rejection: the controllers check it again.
"""

import asyncio
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from quire_operator.api import AdapterSpec, Invalid, Spec
from quire_operator.api.fields import JSON, Problem, section_of
from quire_operator.capacity.check import CapacityCheck
from quire_operator.deployment.conditions import unshared_cache
from quire_operator.deployment.desired import NONBLOCKING_KINDS, all_problems, desired
from quire_operator.deployment.manifests import Manifests
from quire_operator.deployment.plan import is_adoptable
from quire_operator.deployment.pod_template import Images
from quire_operator.deployment.volumes import file_problem
from quire_operator.kube.client import KubeClient
from quire_operator.kube.errors import ClusterError, Refused
from quire_operator.kube.objects import Key, Ref, Resource
from quire_operator.kube.trimming import trim_adapter, trim_resource
from quire_operator.lora.placement import Listing, Refusal


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


logger = logging.getLogger(__name__)

DRY_RUN_SECONDS, ESTIMATE_SECONDS = 4.0, 4.0
"""Their sum is below the ten seconds that the API server waits for a webhook."""


class Reviewer:
    """A reviewer of LLMDeployments. It keeps no state between reviews."""

    def __init__(self, *, kube: KubeClient, images: Images, capacity: CapacityCheck | None = None) -> None:
        self._kube, self._images, self._capacity = kube, images, capacity

    async def review(self, new: Mapping[str, object], old: Mapping[str, object] | None) -> Review:
        """Return the review of an object that is about to be stored; ``old`` is the stored one."""
        if asks_for_nothing(new, old):
            return ALLOWED
        resource = trim_resource(new)
        spec = Spec.parse(resource.body)
        if isinstance(spec, Invalid):
            return Review(problems=all_problems(spec, self._images))
        manifests = desired(spec, spec.initial_replicas, uid=resource.uid, images=self._images)
        if isinstance(manifests, Invalid):
            return Review(problems=manifests.problems)
        if (problem := unshared_cache(spec)) is not None:
            return Review(problems=(problem,))
        review = await self._tried(resource, manifests, is_new=old is None)
        warnings = (*review.warnings, *await self._estimated(spec))
        return replace(review, warnings=warnings)

    async def _estimated(self, spec: Spec) -> tuple[str, ...]:
        """Return a warning if the model is known not to fit. It is an estimate, so it never rejects."""
        if self._capacity is None:
            return ()
        try:
            async with asyncio.timeout(ESTIMATE_SECONDS):
                unfit = await self._capacity.refusal(spec)
        except TimeoutError:
            return ()
        return () if unfit is None else (f"{unfit.reason}: {unfit.message}",)

    async def _tried(self, resource: Resource, manifests: Manifests, *, is_new: bool) -> Review:
        """Return the API server's review of the names of the children and of the Deployment.

        Only the API server knows most rules of pod templates.
        """
        try:
            async with asyncio.timeout(DRY_RUN_SECONDS):
                if (review := await self._name_conflicts(resource, manifests, is_new=is_new)) is not None:
                    return review
                await self._kube.check_template(resource.key, manifests.trial)
        except Refused as error:
            refused = Problem(path="", message=f"the API server rejected the Deployment of this spec: {error}")
            return Review(problems=(refused,))
        except (ClusterError, TimeoutError) as error:
            reason = str(error) or "the API server took too long"
            logger.warning("%s: dry run failed: %s", resource.key, reason)
            return Review(warnings=(f"spec.podTemplate was not validated by the API server: {reason}",))
        return ALLOWED

    async def _owner(self, key: Key, ref: Ref) -> str | None:
        """Return the uid of an object's controller, "" if it has none, or None if its name is free."""
        child = await self._kube.read_child(key, ref)
        if child is None or is_adoptable(child):
            return None
        return "" if child.owner is None else child.owner.uid

    async def _name_conflicts(self, resource: Resource, manifests: Manifests, *, is_new: bool) -> Review | None:
        """Return the review of children whose names are taken; None if all are free.

        A new LLMDeployment is rejected if an object without a controller has the name, such as an application's
        Service. An object with a controller may belong to an earlier LLMDeployment of this name and will be deleted.
        """
        needed = [child.ref for child in manifests if child.ref.kind not in NONBLOCKING_KINDS]
        owners = await asyncio.gather(*(self._owner(resource.key, ref) for ref in needed))
        taken = [(ref, owner) for ref, owner in zip(needed, owners, strict=True) if owner not in (None, resource.uid)]
        if not taken:
            return None
        message = (
            f"{', '.join(str(ref) for ref, _ in taken)} in {resource.key.namespace} already exists and has another "
            "owner; nothing runs until it is deleted. Choose a name that no other object of these kinds has"
        )
        if is_new and any(owner == "" for _, owner in taken):
            return Review(problems=(Problem(path="metadata.name", message=message),))
        return Review(warnings=(f"metadata.name: {message}",))


Preview = Callable[[Resource], Listing | None]


class AdapterReviewer:
    """A reviewer of LLMAdapters. ``preview`` returns the decision about one that is about to be stored."""

    def __init__(self, preview: Preview) -> None:
        self._preview = preview

    async def review(self, new: Mapping[str, object], old: Mapping[str, object] | None) -> Review:
        if asks_for_nothing(new, old):
            return ALLOWED
        resource = trim_adapter(new)
        spec = AdapterSpec.parse(resource.body)
        if isinstance(spec, Invalid):
            return Review(problems=spec.problems)
        if (problem := file_problem(spec.source)) is not None:
            return Review(problems=(Problem(path="spec.source", message=problem),))
        listing = self._preview(resource)
        if listing is None or listing.refusal in (None, Refusal.INVALID_SPEC):
            return ALLOWED
        return Review(warnings=(f"{listing.refusal}: {listing.message}",))
