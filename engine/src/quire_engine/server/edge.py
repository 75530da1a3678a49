"""What every request passes first: its id, its key; and on the way out the load report and a line in the log.

Plain ASGI, so that streams pass through as they are.
"""

import logging
import re
import time
from collections.abc import MutableMapping
from typing import Any
from uuid import uuid4

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from quire_engine import logs
from quire_engine.errors import RequestError
from quire_engine.server.access import Access
from quire_engine.server.caller import ANYBODY
from quire_engine.server.load_report import ASKED_BY, HEADER, load_report
from quire_engine.server.metrics import Metrics
from quire_engine.server.problems import error_response

_log = logging.getLogger(__name__)

_ID = re.compile(r"[A-Za-z0-9._:-]{1,128}")


class Edge:
    """``log_requests`` writes one line a request: never what was asked or answered."""

    def __init__(self, app: ASGIApp, access: Access, metrics: Metrics, *, log_requests: bool) -> None:
        self._app = app
        self._access = access
        self._metrics = metrics
        self._log_requests = log_requests

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        request_id = _request_id(headers)
        token = logs.request_id.set(request_id)
        began = time.monotonic()
        status = 0
        caller = ANYBODY

        async def send_with_id(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                answered = MutableHeaders(scope=message)
                answered["x-request-id"] = request_id
                asked = headers.get(ASKED_BY)
                if asked is not None and (report := load_report(asked, self._metrics.engine.latest)) is not None:
                    answered[HEADER] = report
                if caller.allowance is not None:
                    answered.update(caller.allowance.headers())
            await send(message)

        try:
            client = scope.get("client")
            try:
                caller = self._access.check(scope["path"], headers, client[0] if client else None)
                if caller.allowance is not None and scope["method"] == "POST":
                    caller.allowance.take_request()
            except RequestError as error:
                self._metrics.rejected["key_limit" if error.status == 429 else "unauthorized"] += 1
                await error_response(error)(scope, receive, send_with_id)
                return
            state: MutableMapping[str, Any] = scope.setdefault("state", {})
            state["request_id"] = request_id
            state["caller"] = caller
            await self._app(scope, receive, send_with_id)
        finally:
            if self._log_requests:
                seconds = time.monotonic() - began
                _log.info("%s %s %s %.3f s", scope["method"], scope["path"], status or "closed", seconds)
            logs.request_id.reset(token)


def _request_id(headers: Headers) -> str:
    """The client's, where it can be passed on as it is."""
    given = headers.get("x-request-id", "")
    return given if _ID.fullmatch(given) else uuid4().hex
