"""The HTTP side: routes, the list of models, health, metrics, and errors in OpenAI's shape.

``__main__`` builds it from a ``Config``; ``proxy`` forwards requests.
"""

import logging

import msgspec
from aiohttp import web
from aiohttp.typedefs import Handler, Middleware

from quire_common.contract.engine import CLIENT_PATHS, NO_STORED_RESPONSES
from quire_common.contract.gateway import LIVE_PATH, REQUESTS_PATH, TRACKS_PATH
from quire_common.key_file import KeyFile, api_token
from quire_gateway import headers
from quire_gateway.connections import is_surplus, track_requests
from quire_gateway.errors import (
    BadRequest,
    GatewayError,
    NoReplica,
    NotFound,
    ResponsesNotStored,
    Unauthorized,
    UnknownModel,
    error_response,
)
from quire_gateway.fleet import Fleet
from quire_gateway.metrics import Metrics
from quire_gateway.proxy import KEY, MODEL, Proxy
from quire_gateway.tenants import TENANT, Tenants

_METRICS_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_RESPONSE = "/v1/responses/resp_{path:.+}"

OPEN_PATHS = frozenset({LIVE_PATH, "/readyz", "/health", "/metrics", REQUESTS_PATH, TRACKS_PATH})
"""Paths that need no key, because probes and scrapers have none."""

_log = logging.getLogger(__name__)


class Site:
    """The routes that the gateway answers itself."""

    def __init__(self, *, fleet: Fleet, metrics: Metrics, hides_names: bool = False) -> None:
        self._fleet, self._metrics, self._hides_names = fleet, metrics, hides_names
        self.draining = False

    async def models(self, request: web.Request) -> web.Response:
        names = [] if self._hides_names else sorted(self._fleet.pools)
        return _json({"object": "list", "data": [self._model(name) for name in names]})

    async def model(self, request: web.Request) -> web.Response:
        name = request.match_info["model"]
        if name not in self._fleet.pools:
            raise UnknownModel(f"the model {name[:200]!r} does not exist")
        return _json(self._model(name))

    async def alive(self, request: web.Request) -> web.Response:
        return web.Response(text="ok\n")

    async def ready(self, request: web.Request) -> web.Response:
        """Answer the readiness probe: 503 while draining, and before discovery has published."""
        if self.draining:
            return web.Response(status=503, text="draining\n")
        if not self._fleet.is_synced:
            return web.Response(status=503, text="no snapshot of the replicas yet\n")
        return web.Response(text="ok\n")

    async def metrics(self, request: web.Request) -> web.Response:
        return web.Response(body=self._metrics.render(), headers={"Content-Type": _METRICS_TYPE})

    async def requests(self, request: web.Request) -> web.Response:
        """Answer with the requests that wait and run per model, which the autoscaler polls every second."""
        return _json({"models": self._metrics.current_requests()})

    async def tracks(self, request: web.Request) -> web.Response:
        """Answer with what the tracks of models with a canary have served, which the operator compares."""
        return _json({"models": self._metrics.tracks()})

    async def response(self, request: web.Request) -> web.Response:
        raise ResponsesNotStored(f"{request.path[:200]}: {NO_STORED_RESPONSES}")

    async def not_found(self, request: web.Request) -> web.Response:
        raise NotFound(f"unknown route {request.method} {request.path[:200]}; the API is under /v1/")

    def _model(self, name: str) -> dict[str, object]:
        pool = self._fleet.pools[name]
        return {
            "id": name,
            "object": "model",
            "created": pool.created,
            "owned_by": "quire",
            # Only engines know the source of an adapter, which is its root.
            "root": name if pool.adapter_of is None else None,
            "parent": pool.adapter_of or None,
            "max_model_len": pool.max_model_len,
        }


def build_app(
    *,
    fleet: Fleet,
    site: Site,
    proxy: Proxy,
    metrics: Metrics,
    hold_timeout_seconds: float,
    keys: KeyFile | None = None,
) -> web.Application:
    """Return the application: all routes, and middlewares for errors, API keys and the first snapshot."""
    access = [] if keys is None else [_require_key(keys)]
    middlewares = [_errors(metrics), track_requests(OPEN_PATHS), *access, _wait_for_models(fleet, hold_timeout_seconds)]
    app = web.Application(middlewares=middlewares)

    async def finish_headers(request: web.Request, response: web.StreamResponse) -> None:
        response.headers["Server"] = headers.SERVER
        if site.draining or is_surplus(request):
            response.headers["Connection"] = "close"
            response.force_close()

    app.on_response_prepare.append(finish_headers)
    app.router.add_route("*", _RESPONSE, site.response)
    for path in CLIENT_PATHS:
        app.router.add_post(path, proxy.handle)
    app.router.add_get("/v1/models", site.models)
    app.router.add_get("/v1/models/{model:.+}", site.model)
    app.router.add_get(LIVE_PATH, site.alive)
    app.router.add_get("/readyz", site.ready)
    app.router.add_get("/health", site.ready)
    app.router.add_get("/metrics", site.metrics)
    app.router.add_get(REQUESTS_PATH, site.requests)
    app.router.add_get(TRACKS_PATH, site.tracks)
    app.router.add_route("*", "/{path:.*}", site.not_found)
    return app


def _errors(metrics: Metrics) -> Middleware:
    """Return a middleware that turns errors into answers and counts them."""

    def answer(request: web.Request, error: GatewayError, *, status: int | None = None) -> web.Response:
        response = error_response(request, error, status=status)
        reason = error.code or error.type
        metrics.errors.labels(request.get(MODEL, ""), str(response.status), reason).inc()
        return response

    @web.middleware
    async def middleware(request: web.Request, handler: Handler) -> web.StreamResponse:
        try:
            return await handler(request)
        except GatewayError as error:
            return answer(request, error)
        except web.HTTPException as error:
            return answer(request, BadRequest(error.reason), status=error.status)
        except ConnectionResetError:
            # The client disconnected: an answer would reach nothing.
            raise
        except Exception:
            _log.exception(
                "request failed: request %s: %s %s: unhandled exception (bug)",
                headers.request_id(request),
                request.method,
                request.path,
            )
            return answer(request, GatewayError("internal error; the gateway's log has the details"))

    return middleware


def _require_key(keys: KeyFile) -> Middleware:
    """Return a middleware that requires an API key."""
    tenants = Tenants(keys)

    @web.middleware
    async def middleware(request: web.Request, handler: Handler) -> web.StreamResponse:
        if request.path not in OPEN_PATHS:
            token = api_token(request.headers.get("Authorization", ""), request.headers.get("X-Api-Key", ""))
            if token is None:
                raise Unauthorized(
                    "send an API key in the header Authorization: Bearer KEY or x-api-key: KEY", code="missing_api_key"
                )
            key = keys.find(token)
            if key is None:
                raise Unauthorized("this API key is unknown", code="invalid_api_key")
            request[KEY], request[TENANT] = key, tenants.tenant_of(key)
        return await handler(request)

    return middleware


def _wait_for_models(fleet: Fleet, timeout_seconds: float) -> Middleware:
    """Return a middleware that waits until the models are known.

    A gateway whose process was replaced gets requests until its clients notice that it is not ready yet. It must not
    answer them that a model does not exist.
    """

    @web.middleware
    async def middleware(request: web.Request, handler: Handler) -> web.StreamResponse:
        if request.path not in OPEN_PATHS and not await fleet.wait_synced(timeout_seconds=timeout_seconds):
            raise NoReplica("this gateway does not know yet which models are served", retry_after_seconds=1)
        return await handler(request)

    return middleware


def _json(value: object) -> web.Response:
    return web.Response(body=msgspec.json.encode(value), content_type="application/json")
