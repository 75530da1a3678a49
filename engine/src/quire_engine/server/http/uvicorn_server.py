"""uvicorn as a part of a process that handles signals itself."""

from contextlib import AbstractContextManager, nullcontext

import uvicorn


class UvicornServer(uvicorn.Server):
    """A uvicorn server without signal handlers: a signal begins a drain, during which the server must still answer."""

    def capture_signals(self) -> AbstractContextManager[None]:  # type: ignore[override]
        return nullcontext()
