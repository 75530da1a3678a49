"""The defaults of namespaces and of the cluster, applied to what the store shows of LLMDeployments.

``app`` polls the ConfigMaps at intervals, in a standby too, because its webhook needs them. They are few, and a watch
would show all ConfigMaps of the cluster. A change of defaults enqueues all LLMDeployments. Their generation stays
the same, so the rollouts that follow wait for slots like those of a new operator.
"""

import asyncio
import logging
from collections.abc import Callable
from dataclasses import replace

from quire_operator.domain.cluster_state.observed import Resource
from quire_operator.domain.resource.defaults import CONFIG_MAP, KEY, Defaults, apply_defaults, read_defaults
from quire_operator.domain.resource.fields import Problem
from quire_operator.ports import ClusterError, DefaultMap, DefaultMaps, Forbidden
from quire_operator.reconcile.log_once import LogOnce

PERIOD_SECONDS = 15.0
_RETRY_SECONDS = 2.0
_MOST_REFUSALS = 5

_log = logging.getLogger(__name__)


class DefaultsBook:
    """The defaults that are in force."""

    def __init__(self, *, maps: DefaultMaps, namespace: str, changed: Callable[[], None]) -> None:
        """``namespace`` is the one whose defaults hold for the cluster."""
        self._maps, self._namespace, self._changed = maps, namespace, changed
        self._layers: dict[str, Defaults] = {}
        self._versions: dict[str, str] = {}
        self._refreshing = asyncio.Lock()
        self._problems, self._is_refused = LogOnce(_log), False

    async def load(self) -> None:
        """Read the defaults before anything is reconciled: without them, replicas would be replaced for nothing.

        A missing permission means that no defaults exist, unless it comes soon: an API server that has just started
        refuses every request for a moment.
        """
        refusals = 0
        while not await self.refresh():
            refusals += self._is_refused
            if refusals > _MOST_REFUSALS:
                return
            await asyncio.sleep(_RETRY_SECONDS)

    async def follow(self) -> None:
        """Read the defaults, and poll them until cancelled."""
        await self.load()
        while True:
            await asyncio.sleep(PERIOD_SECONDS)
            await self.refresh()

    async def refresh(self) -> bool:
        """Read the ConfigMaps once; return False if that failed. What is known stays then."""
        async with self._refreshing:  # an older list must not replace a newer one
            return await self._refresh()

    async def _refresh(self) -> bool:
        try:
            found = await self._maps.list_defaults()
        except ClusterError as error:
            self._problems.warning(f"reading the defaults of LLMDeployments failed; check the operator's role: {error}")
            self._is_refused = isinstance(error, Forbidden)
            return False
        self._problems.reset()
        versions = {each.namespace: each.version for each in found}
        if versions != self._versions:
            self._versions = versions
            self._layers = {each.namespace: _defaults(each) for each in found}
            for layer in self._layers.values():
                if layer.complaint:
                    _log.warning("invalid defaults, which do not apply: %s", layer.complaint)
            self._changed()
        return True

    def applied_to(self, resource: Resource) -> Resource:
        """Return an LLMDeployment with the defaults of its namespace and of the cluster."""
        places = dict.fromkeys((resource.key.namespace, self._namespace))
        layers = [self._layers[place] for place in places if place in self._layers]
        spec = resource.body.get("spec")
        if not layers or not isinstance(spec, dict):
            return resource
        applied = apply_defaults(spec, layers)
        complaint = "; ".join(layer.complaint for layer in layers if layer.complaint)
        return replace(
            resource,
            body={**resource.body, "spec": applied.spec},
            defaults=applied.origins,
            defaults_problem=complaint,
        )


def _defaults(found: DefaultMap) -> Defaults:
    source = f"{found.namespace}/{CONFIG_MAP}"
    if found.problem:
        return Defaults(source=source, problems=(Problem(path=f"data.{KEY}", message=found.problem),))
    return read_defaults(found.document, source=source)
