"""The middleware that every request passes first: request id, trace and authentication."""

import logging
import re
import time
from collections.abc import MutableMapping
from dataclasses import replace
from typing import Any
from uuid import uuid4

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from quire_common.logs import request_id as current_request_id
from quire_common.logs import trace_id as current_trace_id
from quire_engine.api.auth import ANONYMOUS, Access, Identity
from quire_engine.api.http_server import CERTIFIED
from quire_engine.api.metrics import LOAD_FORMAT_HEADER, LOAD_HEADER, Metrics, load_report
from quire_engine.api.problems import error_response, shortened
from quire_engine.api.tracing import (
    UNTRACED,
    Span,
    TraceContext,
    Tracing,
    read_context,
    request_attributes,
    span_name,
)
from quire_engine.errors import RequestError

_log = logging.getLogger(__name__)

_ID = re.compile(r"[A-Za-z0-9._:-]{1,128}")
_LOGGED_CHARACTERS = 200


class Edge:
    """The outermost application. With ``log_requests`` it logs one line per request, without prompt and answer."""

    def __init__(
        self, app: ASGIApp, access: Access, metrics: Metrics, *, log_requests: bool, tracing: Tracing | None = None
    ) -> None:
        self._app = app
        self._access = access
        self._metrics = metrics
        self._log_requests = log_requests
        self._tracing = tracing

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        request_id = _request_id(headers)
        parent = read_context(_joined(headers, "traceparent"), _joined(headers, "tracestate"))
        span = self._begin_span(scope, request_id, parent)
        trace = parent if span is None else span.context
        tokens = current_request_id.set(request_id), current_trace_id.set(trace.trace_id if trace else None)
        state: MutableMapping[str, Any] = scope.setdefault("state", {})
        state["request_id"] = request_id
        answer = _ResponseHeaders(self, send, headers, _id_headers(request_id, trace))
        began = time.monotonic()
        try:
            try:
                identity = self._admit(scope, headers, answer)
            except RequestError as error:
                self._metrics.rejected["key_limit" if error.status == 429 else "unauthorized"] += 1
                await error_response(error, scope["path"])(scope, receive, answer.send)
                return
            state["identity"] = identity if span is None else replace(identity, span=span)
            await self._app(_as_get(scope), receive, answer.send)
        finally:
            if span is not None:
                span.set_attributes({"http.response.status_code": answer.status})
                span.end(failed=answer.status >= 500)
            if self._log_requests:
                seconds = time.monotonic() - began
                path = shortened(scope["path"], _LOGGED_CHARACTERS)
                _log.info("%s %s %s %.3f s", scope["method"], path, answer.status or "closed", seconds)
            current_request_id.reset(tokens[0])
            current_trace_id.reset(tokens[1])

    def _begin_span(self, scope: Scope, request_id: str, parent: TraceContext | None) -> Span | None:
        method, path = scope["method"], scope["path"]
        if self._tracing is None or path in UNTRACED:
            return None
        return self._tracing.begin(span_name(method, path), parent, request_attributes(method, path, request_id))

    def _admit(self, scope: Scope, headers: Headers, answer: "_ResponseHeaders") -> Identity:
        """Return the identity of the client. Raises RequestError where its key or its rate limit does not permit it."""
        client = scope.get("client")
        certified = scope["state"].get(CERTIFIED, False)
        identity = self._access.check(scope["path"], headers, client[0] if client else None, certified=certified)
        answer.identity = identity
        if identity.allowance is not None and scope["method"] == "POST":
            identity.allowance.charge_request()
        return identity

    def load(self, format: str | None) -> str | None:
        """Return the load report in the requested format; None where none is requested."""
        return None if format is None else load_report(format, self._metrics.engine.latest)


class _ResponseHeaders:
    """A sender that adds headers to the start of a response and records its status."""

    def __init__(self, edge: Edge, send: Send, request_headers: Headers, id_headers: dict[str, str]) -> None:
        self._edge = edge
        self._send = send
        self._request_headers = request_headers
        self._id_headers = id_headers
        self.identity = ANONYMOUS
        self.status = 0

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
            headers = MutableHeaders(scope=message)
            headers.update(self._id_headers)
            if (report := self._edge.load(self._request_headers.get(LOAD_FORMAT_HEADER))) is not None:
                headers[LOAD_HEADER] = report
            if self.identity.allowance is not None:
                headers.update(self.identity.allowance.headers())
        await self._send(message)


def _as_get(scope: Scope) -> Scope:
    """Turn HEAD into GET, for the many probes that use it; uvicorn leaves out the body."""
    return {**scope, "method": "GET"} if scope["method"] == "HEAD" else scope


def _joined(headers: Headers, name: str) -> str:
    """Return all values of a header as one list; two values of a header that may occur once cannot be parsed."""
    return ",".join(headers.getlist(name))


def _request_id(headers: Headers) -> str:
    """Return the client's request id where it is valid, else a new one."""
    given = headers.get("x-request-id", "")
    return given if _ID.fullmatch(given) else uuid4().hex


def _id_headers(request_id: str, trace: TraceContext | None) -> dict[str, str]:
    headers = {"x-request-id": request_id}
    if trace is not None:
        headers["traceparent"] = trace.traceparent
        if trace.state:
            headers["tracestate"] = trace.state
    return headers
