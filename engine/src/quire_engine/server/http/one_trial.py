"""The lock that keeps trials apart: a request that another engine was lost with runs with no other such request.

Gateways mark such a request with a header. Each gateway tries one at a time here, but does not know about the others.
Streams that go on after their first tokens run together, but not with a request that is tried alone.
It is plain ASGI and outside of ``edge``: a refused trial is repeated, so it must not be charged to the client's key.
"""

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from quire_common.contract.engine import TRIAL_HEADER, TRIAL_RUNNING, TRIAL_TOGETHER
from quire_engine.errors import Overloaded
from quire_engine.server.http.problems import error_response

_RETRY_SECONDS = 1


class OneTrial:
    """An application that answers 429 to a trial while another one has no answer yet.

    The start of a response ends the trial. A gateway never repeats a request after that.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app
        self._running: dict[object, bool] = {}
        """The trials; True for one that runs together with others."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve a request; one with the header only if no other one runs."""
        header = Headers(scope=scope).get(TRIAL_HEADER) if scope["type"] == "http" else None
        if header is None:
            await self._app(scope, receive, send)
            return
        together = header == TRIAL_TOGETHER
        if self._running and not (together and all(self._running.values())):
            error = Overloaded(
                "a request that was lost with another engine is being tried here; try again when it has its answer",
                code=TRIAL_RUNNING,
                retry_after_seconds=_RETRY_SECONDS,
            )
            await error_response(error, scope["path"])(scope, receive, send)
            return
        trial = object()
        self._running[trial] = together

        async def send_and_end(message: Message) -> None:
            self._end(trial)
            await send(message)

        try:
            await self._app(scope, receive, send_and_end)
        finally:
            self._end(trial)

    def _end(self, trial: object) -> None:
        self._running.pop(trial, None)
