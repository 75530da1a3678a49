"""The review of a new or changed LLMDeployment: ``Spec.parse`` → ``desired`` → a dry run on the API server.

``handlers`` calls it for each review that the webhook gets, on the leader and on standbys. It writes nothing. What
cannot be checked in time is a warning and never a rejection, because the reconciler checks it again.
"""

import asyncio
import logging
from collections.abc import Mapping
from dataclasses import replace

from quire_operator.domain.cluster_state.observed import Resource
from quire_operator.domain.cluster_state.trimming import trim_resource
from quire_operator.domain.manifests.child_kinds import NONBLOCKING_KINDS
from quire_operator.domain.manifests.desired import all_problems, desired
from quire_operator.domain.manifests.objects import Manifests
from quire_operator.domain.manifests.pod_template import Images
from quire_operator.domain.resource import Invalid, Spec
from quire_operator.domain.resource.fields import Problem
from quire_operator.domain.status.cache_check import unshared_cache
from quire_operator.domain.status.review import ALLOWED, Review, asks_for_nothing
from quire_operator.ports import ClusterError, DryRun, Refused
from quire_operator.reconcile.capacity_check import CapacityCheck

logger = logging.getLogger(__name__)

DRY_RUN_SECONDS, ESTIMATE_SECONDS = 4.0, 4.0
"""Their sum is below the ten seconds that the API server waits for a webhook."""


class Reviewer:
    """A reviewer of LLMDeployments. It keeps no state between reviews."""

    def __init__(self, *, dry_run: DryRun, images: Images, capacity: CapacityCheck | None = None) -> None:
        self._dry_run, self._images, self._capacity = dry_run, images, capacity

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
                await self._dry_run.apply(resource.key, manifests.trial)
        except Refused as error:
            refused = Problem(path="", message=f"the API server rejected the Deployment of this spec: {error}")
            return Review(problems=(refused,))
        except (ClusterError, TimeoutError) as error:
            reason = str(error) or "the API server took too long"
            logger.warning("%s: dry run failed: %s", resource.key, reason)
            return Review(warnings=(f"spec.podTemplate was not validated by the API server: {reason}",))
        return ALLOWED

    async def _name_conflicts(self, resource: Resource, manifests: Manifests, *, is_new: bool) -> Review | None:
        """Return the review of children whose names are taken; None if all are free.

        A new LLMDeployment is rejected if an object without a controller has the name, such as an application's
        Service. An object with a controller may belong to an earlier LLMDeployment of this name and will be deleted.
        """
        needed = [child.ref for child in manifests if child.ref.kind not in NONBLOCKING_KINDS]
        owners = await asyncio.gather(*(self._dry_run.owner(resource.key, ref) for ref in needed))
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
