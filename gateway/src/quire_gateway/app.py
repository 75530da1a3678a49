"""The HTTP side: routes, the list of models, health, metrics, errors as OpenAI writes them.

Built by ``__main__`` from a ``Config``; ``proxy`` does the forwarding.
"""

import logging

import msgspec
from aiohttp import web
from aiohttp.typedefs import Handler, Middleware

from quire_gateway import headers
from quire_gateway.errors import BadRequest, GatewayError, NoReplica, NotFound, Unauthorized, UnknownModel
from quire_gateway.fleet import Fleet
from quire_gateway.keys import KeyFile
from quire_gateway.metrics import Metrics
from quire_gateway.proxy import MODEL, Proxy

_METRICS_TYPE = "text/plain; version=0.0.4; charset=utf-8"
# No dots: a path that climbs out of /v1 must not reach a replica's other routes.
_PROXIED = "/v1/{path:[A-Za-z0-9_/-]+}"

OPEN_PATHS = frozenset({"/livez", "/readyz", "/health", "/metrics", "/requests"})
"""Paths that need no key: whoever probes and scrapes has none."""

_log = logging.getLogger(__name__)


class Site:
    """What the gateway answers itself."""

    def __init__(self, *, fleet: Fleet, metrics: Metrics) -> None:
        self._fleet, self._metrics = fleet, metrics
        self.draining = False

    async def models(self, request: web.Request) -> web.Response:
        return _json({"object": "list", "data": [self._model(name) for name in sorted(self._fleet.pools)]})

    async def model(self, request: web.Request) -> web.Response:
        name = request.match_info["model"]
        if name not in self._fleet.pools:
            raise UnknownModel(f"the model {name[:200]!r} does not exist")
        return _json(self._model(name))

    async def alive(self, request: web.Request) -> web.Response:
        return web.Response(text="ok\n")

    async def ready(self, request: web.Request) -> web.Response:
        if self.draining:
            return web.Response(status=503, text="draining\n")
        if not self._fleet.is_synced:
            return web.Response(status=503, text="no list of replicas yet\n")
        return web.Response(text="ok\n")

    async def metrics(self, request: web.Request) -> web.Response:
        return web.Response(body=self._metrics.render(), headers={"Content-Type": _METRICS_TYPE})

    async def requests(self, request: web.Request) -> web.Response:
        """How many requests wait and run, of each model that has any: what an autoscaler asks every moment."""
        return _json({"models": self._metrics.current_requests()})

    async def nothing(self, request: web.Request) -> web.Response:
        raise NotFound(f"there is no {request.method} {request.path[:200]} here; the API is under /v1/")

    def _model(self, name: str) -> dict[str, object]:
        return {"id": name, "object": "model", "created": self._fleet.pools[name].created, "owned_by": "quire"}


def build_app(
    *,
    fleet: Fleet,
    site: Site,
    proxy: Proxy,
    metrics: Metrics,
    max_body_bytes: int,
    hold_timeout_seconds: float,
    keys: KeyFile | None = None,
) -> web.Application:
    """All routes, under what asks for keys, what waits for the models, and what turns errors into answers."""
    asking = [] if keys is None else [_key_asked(keys)]
    middlewares = [_errors(metrics), *asking, _models_known(fleet, hold_timeout_seconds)]
    app = web.Application(client_max_size=max_body_bytes, middlewares=middlewares)

    async def finish_headers(request: web.Request, response: web.StreamResponse) -> None:
        response.headers["Server"] = "quire-gateway"
        if site.draining:
            response.headers["Connection"] = "close"
            response.force_close()

    app.on_response_prepare.append(finish_headers)
    app.router.add_post(_PROXIED, proxy.handle)
    app.router.add_post("/{path:tokenize|detokenize}", proxy.handle)
    app.router.add_get("/v1/models", site.models)
    app.router.add_get("/v1/models/{model:.+}", site.model)
    app.router.add_get("/livez", site.alive)
    app.router.add_get("/readyz", site.ready)
    app.router.add_get("/health", site.ready)
    app.router.add_get("/metrics", site.metrics)
    app.router.add_get("/requests", site.requests)
    app.router.add_route("*", "/{path:.*}", site.nothing)
    return app


def _errors(metrics: Metrics) -> Middleware:
    """Turns errors into answers, and counts them."""

    def refused(request: web.Request, error: GatewayError, *, status: int | None = None) -> web.Response:
        response = _refused(request, error, status=status or error.status)
        reason = error.code or error.type
        metrics.errors.labels(request.get(MODEL, ""), str(response.status), reason).inc()
        return response

    @web.middleware
    async def middleware(request: web.Request, handler: Handler) -> web.StreamResponse:
        try:
            return await handler(request)
        except GatewayError as error:
            return refused(request, error)
        except web.HTTPException as error:
            return refused(request, BadRequest(error.reason), status=error.status)
        except ConnectionResetError:
            # The client left; there is nobody to tell.
            raise
        except Exception:
            _log.exception("%s %s failed", request.method, request.path)
            return refused(request, GatewayError("the gateway failed; its log says why"))

    return middleware


def _key_asked(keys: KeyFile) -> Middleware:
    """Lets in who brings a key. The header goes on to the replica as it is: it may have keys of its own."""

    @web.middleware
    async def middleware(request: web.Request, handler: Handler) -> web.StreamResponse:
        if request.path not in OPEN_PATHS:
            keys.check(request.headers.get("Authorization", ""))
        return await handler(request)

    return middleware


def _models_known(fleet: Fleet, timeout_seconds: float) -> Middleware:
    """Waits until it is known which models there are. A gateway whose process was replaced gets requests until others
    have heard that it is not ready yet; it must not deny its models to them.
    """

    @web.middleware
    async def middleware(request: web.Request, handler: Handler) -> web.StreamResponse:
        if request.path not in OPEN_PATHS and not await fleet.wait_synced(timeout_seconds=timeout_seconds):
            raise NoReplica("this gateway has not learnt yet which models are served", retry_after_seconds=1)
        return await handler(request)

    return middleware


def _refused(request: web.Request, error: GatewayError, *, status: int) -> web.Response:
    response = web.Response(status=status, body=error.body(), content_type="application/json")
    response.headers[headers.REQUEST_ID] = headers.request_id(request.headers)
    if error.retry_after_seconds is not None:
        response.headers["Retry-After"] = str(error.retry_after_seconds)
    if isinstance(error, Unauthorized):
        response.headers["WWW-Authenticate"] = "Bearer"
    return response


def _json(value: object) -> web.Response:
    return web.Response(body=msgspec.json.encode(value), content_type="application/json")
