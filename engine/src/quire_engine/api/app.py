"""The ASGI application: the routes, the responses to errors, and the middleware that every request passes first."""

import logging

from fastapi import FastAPI
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from quire_common.contract.engine import NO_STORED_RESPONSES, NOT_STORED
from quire_engine import __version__
from quire_engine.api import anthropic, chat, completions, embeddings, health, models, openapi, responses, tokenize
from quire_engine.api.auth import Access
from quire_engine.api.context import Context
from quire_engine.api.generation import ClientGone
from quire_engine.api.metrics import Exposition
from quire_engine.api.middleware import Edge
from quire_engine.api.openapi import describe
from quire_engine.api.problems import error_response, shortened
from quire_engine.api.tracing import Tracing
from quire_engine.errors import InternalError, InvalidRequest, MethodNotAllowed, NotFound, RequestError

_log = logging.getLogger(__name__)


class RootPath:
    """An application below a prefix. Requests without the prefix are served too, because probes come without it."""

    def __init__(self, app: ASGIApp, prefix: str) -> None:
        self._app = app
        self._prefix = prefix

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve a request at its path without the prefix."""
        path: str = scope.get("path", "")
        if path == self._prefix or path.startswith(f"{self._prefix}/"):
            scope = {**scope, "path": path.removeprefix(self._prefix) or "/"}
        await self._app(scope, receive, send)


_ROUTES = (chat, completions, anthropic, responses, embeddings, models, tokenize, health, openapi)

_EXPOSED = ("x-request-id", "retry-after", "traceparent")
"""The response headers that a web page may read."""

_CLIENT_CLOSED_REQUEST = 499
"""The status in the access log and in traces, as in nginx; the client does not read it."""

_DESCRIPTION = "OpenAI-compatible API of one language model, served by quire's engine."


def create_app(
    context: Context,
    exposition: Exposition,
    access: Access,
    *,
    log_requests: bool,
    tracing: Tracing | None = None,
) -> ASGIApp:
    """Return the application of one server."""
    app = FastAPI(
        title="quire-engine",
        version=__version__,
        description=_DESCRIPTION,
        docs_url=None,  # see docs_page
        redoc_url=None,
        swagger_ui_oauth2_redirect_url=None,
        servers=[{"url": context.options.root_path}] if context.options.root_path else None,
    )
    app.state.context = context
    app.state.exposition = exposition
    for routes in _ROUTES:
        app.include_router(routes.router)
    describe(app, context)
    app.add_exception_handler(RequestError, _request_error)
    app.add_exception_handler(HTTPException, _routing_error)
    app.add_exception_handler(ClientDisconnect, _client_disconnected)
    app.add_exception_handler(ClientGone, _client_disconnected)
    app.add_exception_handler(Exception, _internal_error)
    edge: ASGIApp = Edge(app, access, context.metrics, log_requests=log_requests, tracing=tracing)
    if context.options.root_path:
        edge = RootPath(edge, context.options.root_path)
    origins = context.options.allowed_origins
    if not origins:
        return edge
    # Outside of the authentication: a browser asks first, without a key, whether it may send one.
    return CORSMiddleware(edge, origins, allow_methods=("GET", "POST"), allow_headers=("*",), expose_headers=_EXPOSED)


_REJECTED = {
    "draining": "draining",
    "engine_starting": "no_engine",
    "engine_restarting": "no_engine",
    "engine_failed": "no_engine",
}
"""The reason under which a refused request is counted, by error code; the queue and the keys count their own."""


async def _request_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, RequestError)
    if (reason := _REJECTED.get(error.code or "")) is not None:
        request.app.state.context.metrics.rejected[reason] += 1
    return error_response(error, request.url.path)


async def _routing_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    path = shortened(request.url.path, 200)
    answer: RequestError = InvalidRequest(str(error.detail))
    if request.url.path.startswith("/v1/responses/resp_"):
        answer = NotFound(f"{path}: {NO_STORED_RESPONSES}", code=NOT_STORED)
    elif error.status_code == 404:
        answer = NotFound(f"no route {path}; /docs lists the routes of this server")
    elif error.status_code == 405:
        answer = MethodNotAllowed(f"{path} does not accept {request.method}")
        # Starlette lists the methods in any order.
        error.headers = {"Allow": ", ".join(sorted((error.headers or {}).get("Allow", "").split(", ")))}
    response = error_response(answer, request.url.path)
    response.headers.update(error.headers or {})
    return response


async def _client_disconnected(request: Request, error: Exception) -> Response:
    return Response(status_code=_CLIENT_CLOSED_REQUEST)


async def _internal_error(request: Request, error: Exception) -> Response:
    # Starlette logs the traceback after this response.
    return error_response(InternalError("internal server error; the server's log has the details"), request.url.path)
