"""The prefix of paths that a proxy leaves in place: it is removed before anything else reads the path."""

from starlette.types import ASGIApp, Receive, Scope, Send


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
