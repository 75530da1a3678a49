"""Whether a new or changed LLMDeployment is accepted: ``Spec.parse`` → ``desired`` → a dry run on the API server.

Called by ``handlers`` for each review the webhook is sent, on the leader and on those that stand by. Writes nothing.
What can't be found out in time is a warning, never a refusal: the reconciler judges it again.
"""

import asyncio
import logging
from collections.abc import Mapping
from dataclasses import replace

from quire_operator.domain.cluster_state.observed import Key, Resource, trim_resource
from quire_operator.domain.manifests.desired import Manifest, all_problems, desired
from quire_operator.domain.manifests.pod_template import Images
from quire_operator.domain.resource import Invalid, Spec
from quire_operator.domain.resource.fields import Problem
from quire_operator.domain.status.review import ALLOWED, Review, asks_for_nothing
from quire_operator.ports import ClusterError, DryRun, Refused
from quire_operator.reconcile.capacity_check import CapacityCheck

logger = logging.getLogger(__name__)

DRY_RUN_SECONDS, ESTIMATE_SECONDS = 4.0, 4.0
"""Together below the ten seconds that the API server waits for a webhook."""


class Reviewer:
    """Holds nothing between reviews."""

    def __init__(self, *, dry_run: DryRun, images: Images, capacity: CapacityCheck | None = None) -> None:
        self._dry_run, self._images, self._capacity = dry_run, images, capacity

    async def review(self, new: Mapping[str, object], old: Mapping[str, object] | None) -> Review:
        """What to say of an object that is about to be stored; ``old`` is what is stored now."""
        if asks_for_nothing(new, old):
            return ALLOWED
        resource = trim_resource(new)
        spec = Spec.parse(resource.body)
        if isinstance(spec, Invalid):
            return Review(problems=all_problems(spec, self._images))
        manifests = desired(spec, spec.initial_replicas, uid=resource.uid, images=self._images)
        if isinstance(manifests, Invalid):
            return Review(problems=manifests.problems)
        verdict = await self._tried(resource, manifests.deployment)
        return replace(verdict, warnings=(*verdict.warnings, *await self._estimated(spec)))

    async def _estimated(self, spec: Spec) -> tuple[str, ...]:
        """That it will not fit, where that is known in time. An estimate, so no refusal."""
        if self._capacity is None:
            return ()
        try:
            async with asyncio.timeout(ESTIMATE_SECONDS):
                unfit = await self._capacity.refusal(spec)
        except TimeoutError:
            return ()
        return () if unfit is None else (f"{unfit.reason}: {unfit.message}",)

    async def _tried(self, resource: Resource, deployment: Manifest) -> Review:
        """What the API server makes of the Deployment: most of what a pod template can have wrong only it knows."""
        try:
            async with asyncio.timeout(DRY_RUN_SECONDS):
                owner = await self._dry_run.owner(resource.key, deployment.ref)
                if owner is not None and owner != resource.uid:
                    return Review(warnings=(_taken(resource.key, deployment),))
                await self._dry_run.apply(resource.key, deployment)
        except Refused as error:
            refused = Problem(path="", message=f"the API server rejected the Deployment of this spec: {error}")
            return Review(problems=(refused,))
        except (ClusterError, TimeoutError) as error:
            reason = str(error) or "the API server took too long"
            logger.warning("%s: dry run failed: %s", resource.key, reason)
            return Review(warnings=(f"spec.podTemplate was not validated by the API server: {reason}",))
        return ALLOWED


def _taken(key: Key, deployment: Manifest) -> str:
    return (
        f"there is a {deployment.ref} in {key.namespace} that is not this LLMDeployment's: nothing will run until it is"
        " gone or this one has another name"
    )
