"""What every request passes first: its id, its trace, its key; on the way out the load report and a line in the log.

Plain ASGI, so that streams pass through as they are.
"""

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
from quire_engine.errors import RequestError
from quire_engine.server.auth.access import ANYBODY, Access, Caller
from quire_engine.server.http.problems import error_response, shortened
from quire_engine.server.http.protocol import CERTIFIED
from quire_engine.server.observability.exposition import ASKED_BY, HEADER, load_report
from quire_engine.server.observability.metrics import Metrics
from quire_engine.server.observability.tracing import (
    UNTRACED,
    Span,
    TraceContext,
    Tracing,
    name_of,
    read_context,
    request_attributes,
)

_log = logging.getLogger(__name__)

_ID = re.compile(r"[A-Za-z0-9._:-]{1,128}")
_LOGGED_CHARACTERS = 200


class Edge:
    """``log_requests`` writes one line a request: never what was asked or answered."""

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
        answer = _Answer(self, send, headers, _told(request_id, trace))
        began = time.monotonic()
        try:
            try:
                caller = self._admit(scope, headers, answer)
            except RequestError as error:
                self._metrics.rejected["key_limit" if error.status == 429 else "unauthorized"] += 1
                await error_response(error)(scope, receive, answer.send)
                return
            state["caller"] = caller if span is None else replace(caller, span=span)
            await self._app(_as_get(scope), receive, answer.send)
        finally:
            if span is not None:
                span.add({"http.response.status_code": answer.status})
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
        return self._tracing.begin(name_of(method, path), parent, request_attributes(method, path, request_id))

    def _admit(self, scope: Scope, headers: Headers, answer: "_Answer") -> Caller:
        """Raises RequestError where the key, or what it may still use, does not allow it."""
        client = scope.get("client")
        certified = scope["state"].get(CERTIFIED, False)
        caller = self._access.check(scope["path"], headers, client[0] if client else None, certified=certified)
        answer.caller = caller
        if caller.allowance is not None and scope["method"] == "POST":
            caller.allowance.take_request()
        return caller

    def load(self, asked: str | None) -> str | None:
        return None if asked is None else load_report(asked, self._metrics.engine.latest)


class _Answer:
    """Adds to an answer's headers as it begins, and remembers its status."""

    def __init__(self, edge: Edge, send: Send, asked: Headers, told: dict[str, str]) -> None:
        self._edge = edge
        self._send = send
        self._asked = asked
        self._told = told
        self.caller = ANYBODY
        self.status = 0

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
            headers = MutableHeaders(scope=message)
            headers.update(self._told)
            if (report := self._edge.load(self._asked.get(ASKED_BY))) is not None:
                headers[HEADER] = report
            if self.caller.allowance is not None:
                headers.update(self.caller.allowance.headers())
        await self._send(message)


def _as_get(scope: Scope) -> Scope:
    """HEAD is GET without the body, which uvicorn leaves out: many probes ask so."""
    return {**scope, "method": "GET"} if scope["method"] == "HEAD" else scope


def _joined(headers: Headers, name: str) -> str:
    """Fields of one name are one list; of what may be sent once, two make nothing that can be read."""
    return ",".join(headers.getlist(name))


def _request_id(headers: Headers) -> str:
    """The client's, where it can be passed on as it is."""
    given = headers.get("x-request-id", "")
    return given if _ID.fullmatch(given) else uuid4().hex


def _told(request_id: str, trace: TraceContext | None) -> dict[str, str]:
    told = {"x-request-id": request_id}
    if trace is not None:
        told["traceparent"] = trace.traceparent
        if trace.state:
            told["tracestate"] = trace.state
    return told
