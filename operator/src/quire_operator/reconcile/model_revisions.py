"""The resolution of moving model sources by the hub; ``reconciler`` calls it once for each source, not at each pass.

``domain.status.model_status`` decides whether to resolve. A hub that does not answer delays one pass for a few seconds
and the next ones not at all.
"""

from quire_operator.domain.cluster_state.observed import Resource
from quire_operator.domain.resource import HubSource, Spec
from quire_operator.domain.status.model_status import Resolution, needs_resolution, stored_resolution
from quire_operator.reconcile.hub_reader import HubReader


class ModelRevisions:
    """The resolutions of all LLMDeployments."""

    def __init__(self, hub: HubReader | None) -> None:
        """``hub`` is None if the hub may not be used."""
        self._hub = hub

    async def resolution(self, resource: Resource, spec: Spec) -> Resolution | None:
        """Return the resolution of the source of this LLMDeployment; None if pods get the source as it is."""
        if not needs_resolution(spec):
            return None
        if (stored := stored_resolution(resource, spec)) is not None:
            return stored
        if self._hub is None:
            return None
        assert isinstance(spec.model.source, HubSource)
        revision = await self._hub.commit(spec.model.source)
        return Resolution(source=str(spec.model.source), revision=revision, refresh=resource.refresh_model)
