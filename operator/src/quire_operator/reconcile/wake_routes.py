"""The wake routes of all LLMDeployments, applied while this process leads.

``app`` runs ``follow``. A route depends on pods, on the autoscaler's decision and on the gateways' addresses, none of
which change the other children, so routes are applied apart from the passes of ``reconciler``. It is level-triggered:
each round compares the wanted routes with those in the cluster, which are listed at intervals.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

from quire_operator.domain.cluster_state.observed import Key, Resource
from quire_operator.domain.manifests.wake_route import GatewayAddress, WakeRoute, needs_route, wake_route
from quire_operator.domain.resource import Spec
from quire_operator.domain.status.scaling_status import scaling_record
from quire_operator.ports import AppliedRoute, Clock, ClusterError, PartlyForbidden, WakeSlices
from quire_operator.reconcile.log_once import LogOnce
from quire_operator.reconcile.store import Store

_PERIOD_SECONDS = 1.0
_LIST_SECONDS = 300.0
_RETRY_SECONDS = 10.0
"""The pause after an error about one route, and between attempts to list them."""

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Known:
    """A route in the cluster."""

    route: AppliedRoute
    digest: str = ""
    """The digest of what this process applied; empty if it applied nothing or another client changed it since."""


class WakeRoutes:
    """The routes from Services without ready replicas to the gateways."""

    def __init__(
        self,
        *,
        slices: WakeSlices,
        store: Store,
        clock: Clock,
        gateways: Callable[[], Awaitable[Sequence[GatewayAddress]]],
        now: Callable[[], float],
        is_on: bool = True,
    ) -> None:
        """``now`` is a monotonic clock. If it is not on, routes that it finds are removed, and none is added."""
        self._slices, self._store, self._clock = slices, store, clock
        self._gateways, self._now, self._is_on = gateways, now, is_on
        self._known: dict[Key, _Known] = {}
        self._specs: dict[Key, tuple[Resource, Spec | None]] = {}
        self._retry: dict[Key, float] = {}
        self._is_listed, self._list_at = False, 0.0
        self._listing = LogOnce(_log)
        self._changing: dict[Key, LogOnce] = {}
        """The warnings about routes whose last change failed."""

    async def follow(self) -> None:
        """Apply routes until cancelled."""
        self._is_listed, self._list_at, self._known = False, 0.0, {}
        while True:
            await self.poll()
            await asyncio.sleep(_PERIOD_SECONDS)

    async def poll(self) -> None:
        """Compare all routes once, and apply or delete those that differ."""
        if self._now() >= self._list_at:
            await self._list()
        if not self._is_listed:
            return
        gateways = await self._gateways() if self._is_on else ()
        live = self._store.live_keys()
        for key in self._known.keys() - live:
            del self._known[key]  # the garbage collector removes it
        self._specs = {key: self._specs[key] for key in live if key in self._specs}
        self._retry = {key: at for key, at in self._retry.items() if at > self._now()}
        self._changing = {key: self._changing[key] for key in live if key in self._changing}
        for key in live:
            resource = self._store.resource(key)
            if resource is not None and not resource.deleting and key not in self._retry:
                await self._compare(resource, gateways)

    async def _list(self) -> None:
        """List the routes in the cluster. Without the permission, nothing is applied."""
        found: list[AppliedRoute] = []
        try:
            async for route in self._slices.list_routes():
                found.append(route)
            self._listing.reset()
        except PartlyForbidden as error:
            self._warn(
                self._listing,
                f"no wake routes in {', '.join(sorted(error.namespaces))}: check the operator's role there",
            )
        except ClusterError as error:
            message = f"no wake routes, because listing EndpointSlices failed; check the operator's role: {error}"
            self._warn(self._listing, message)
            self._list_at = self._now() + _RETRY_SECONDS
            return
        before = {known.route: known for known in self._known.values()}
        # A route that has another version than the one applied was changed by another client.
        self._known = {route.key: before.get(route, _Known(route)) for route in found}
        self._is_listed, self._list_at = True, self._now() + _LIST_SECONDS

    async def _compare(self, resource: Resource, gateways: Sequence[GatewayAddress]) -> None:
        key, spec = resource.key, self._spec(resource)
        there = self._known.get(key)
        if spec is None or (there is not None and there.route.owner_uid != resource.uid):
            return  # an invalid spec changes nothing; the route of an earlier LLMDeployment goes with that one
        record = scaling_record(resource.status)
        is_wanted = bool(gateways) and needs_route(
            spec,
            self._store.pods(key),
            desired_replicas=None if record is None else record.desired_replicas,
            now=self._clock.now(),
        )
        try:
            if is_wanted:
                await self._apply(key, wake_route(spec, resource.uid, gateways), there)
            elif there is not None:
                await self._slices.delete_route(there.route)
                del self._known[key]
                _log.info("%s: removed the wake route of its Service", key)
            self._changing.pop(key, None)
        except ClusterError as error:
            self._retry[key] = self._now() + _RETRY_SECONDS
            log = self._changing.setdefault(key, LogOnce(_log))
            self._warn(log, f"{key}: changing the wake route of its Service failed: {error}")

    async def _apply(self, key: Key, route: WakeRoute, there: _Known | None) -> None:
        if there is not None and there.digest == route.digest:
            return
        # Without force for a new one: an object of another owner that has its name is left alone.
        applied = await self._slices.apply_route(key, route, force=there is not None)
        self._known[key] = _Known(applied, route.digest)
        if there is None:
            _log.info("%s: added a wake route from its Service to the gateways", key)

    def _spec(self, resource: Resource) -> Spec | None:
        """Return the parsed spec, which is kept because it is needed each second."""
        known = self._specs.get(resource.key)
        if known is not None and known[0] is resource:
            return known[1]
        if known is not None and known[0].uid == resource.uid and known[0].body == resource.body:
            spec = known[1]
        else:
            parsed = Spec.parse(resource.body)
            spec = parsed if isinstance(parsed, Spec) else None
        self._specs[resource.key] = (resource, spec)
        return spec

    def _warn(self, log: LogOnce, message: str) -> None:
        if self._is_on:
            log.warning(message)
