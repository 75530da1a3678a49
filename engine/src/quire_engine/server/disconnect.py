"""Notices that a client went away while its answer is in the making."""

import asyncio
from collections.abc import Callable

from starlette.requests import Request


class DisconnectWatch:
    """Calls ``gone`` once the client has closed the connection. The body must have been read whole before."""

    def __init__(self, request: Request, gone: Callable[[], None]) -> None:
        self._task = asyncio.create_task(self._watch(request, gone))

    async def _watch(self, request: Request, gone: Callable[[], None]) -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass
        gone()

    def stop(self) -> None:
        self._task.cancel()
