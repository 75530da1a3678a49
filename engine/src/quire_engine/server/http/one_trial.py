"""The lock that keeps trials apart: a request that another engine was lost with runs with no other such request.

Gateways mark such a request with a header. Each gateway tries one at a time here, but does not know about the others.
It is plain ASGI and outside of ``edge``: a refused trial is repeated, so it must not be charged to the client's key.
"""

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from quire_common.contract.engine import TRIAL_HEADER, TRIAL_RUNNING
from quire_engine.errors import Overloaded
from quire_engine.server.http.problems import error_response

_RETRY_SECONDS = 1


class OneTrial:
    """An application that answers 429 to a trial while another one has no answer yet.

    The start of a response ends the trial. A gateway never repeats a request after that.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app
        self._running: object | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve a request; one with the header only if no other one runs."""
        if scope["type"] != "http" or TRIAL_HEADER not in Headers(scope=scope):
            await self._app(scope, receive, send)
            return
        if self._running is not None:
            error = Overloaded(
                "a request that was lost with another engine is being tried here; try again when it has its answer",
                code=TRIAL_RUNNING,
                retry_after_seconds=_RETRY_SECONDS,
            )
            await error_response(error, scope["path"])(scope, receive, send)
            return
        trial = self._running = object()

        async def send_and_end(message: Message) -> None:
            self._end(trial)
            await send(message)

        try:
            await self._app(scope, receive, send_and_end)
        finally:
            self._end(trial)

    def _end(self, trial: object) -> None:
        if self._running is trial:
            self._running = None
