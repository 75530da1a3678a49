"""Requests about a response that a replica keeps: get, cancel and delete reach the replica that the id names.

Between ``app`` and the replicas. Nothing is remembered here: the id of a response begins with the tag of its replica
(ADR 0084), so every gateway finds it, also one that started later.
"""

import aiohttp
from aiohttp import web
from yarl import URL

from quire_common.allowance import Allowances
from quire_common.response_ids import replica_tag, tag_of
from quire_gateway import headers
from quire_gateway.errors import UnknownResponse, UpstreamFailed
from quire_gateway.fleet import Backend, Fleet
from quire_gateway.metrics import Metrics
from quire_gateway.proxy import KEY, MODEL
from quire_gateway.scrape import read_capped

_TIMEOUT_SECONDS = 30.0
_MAX_BYTES = 64 * 2**20


def backend_of(fleet: Fleet, response_id: str) -> Backend | None:
    """Return the replica that an id names; None if it has gone, or the id names none."""
    tag = tag_of(response_id)
    if tag is None:
        return None
    return next((backend for backend in fleet.backends() if replica_tag(backend.endpoint.id) == tag), None)


class StoredResponses:
    """The routes for responses that replicas keep."""

    def __init__(
        self,
        *,
        fleet: Fleet,
        session: aiohttp.ClientSession,
        limits: Allowances,
        metrics: Metrics,
        hides_names: bool,
    ) -> None:
        self._fleet, self._session, self._limits, self._metrics = fleet, session, limits, metrics
        self._hides_names = hides_names

    async def handle(self, request: web.Request) -> web.Response:
        """Pass a request on to the replica of its response, or raise ``GatewayError``."""
        key = request.get(KEY)
        allowance = None if key is None else self._limits.of(key)
        if allowance is not None:
            allowance.charge_request()
        response_id = request.match_info["id"]
        backend = backend_of(self._fleet, response_id)
        if backend is None:
            raise UnknownResponse(
                f"no running replica has the response {response_id[:100]!r}; responses are lost with their replica"
            )
        request[MODEL] = backend.model
        request_id = headers.request_id(request)
        try:
            async with self._session.request(
                request.method,
                URL(f"{backend.endpoint.url}{request.path_qs}", encoded=True),
                headers=headers.to_replica(request.headers, request_id=request_id),
                allow_redirects=False,
                timeout=aiohttp.ClientTimeout(total=_TIMEOUT_SECONDS),
            ) as upstream:
                body = await read_capped(upstream.content, _MAX_BYTES)
        except (aiohttp.ClientError, TimeoutError, ValueError) as error:
            raise UpstreamFailed(f"the replica that keeps the response gave no answer: {error}") from error
        self._metrics.requests.labels(backend.model, backend.endpoint.id, str(upstream.status)).inc()
        replica = None if self._hides_names else backend.endpoint.id
        passed = headers.to_client(upstream.headers, request_id=request_id, replica=replica)
        if allowance is not None:
            passed.update(allowance.headers())
        return web.Response(status=upstream.status, reason=upstream.reason, headers=passed, body=body)
