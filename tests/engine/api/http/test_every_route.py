"""Rules for every existing and future route, found in the application itself."""

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from fastapi import FastAPI
from fastapi.routing import APIRoute
from starlette.routing import Route

from quire_engine import logs
from quire_engine.api import app as application
from quire_engine.api.auth import ADMIN_PATHS, METRICS_PATHS
from quire_engine.config import AccessOptions, LogOptions
from quire_engine.errors import InvalidRequest, Unavailable

Serving = Callable[..., Any]
TokenIds = Callable[[str], list[int]]

OPEN = {"/livez", "/readyz", *METRICS_PATHS}
MARKER = "marker-of-what-was-said"


def routes(server: Any) -> list[tuple[str, str]]:
    """Return every method and path of the document and of the application."""
    app = server.app
    while not isinstance(app, FastAPI):
        app = app._app
    found = {
        (method, route.path.replace(":path}", "}"))
        for route in _flattened(app.routes)
        for method in (route.methods or ())
        if method != "HEAD"
    }
    listed = {(method.upper(), path) for path, ways in app.openapi()["paths"].items() for method in ways}
    assert listed <= found and len(listed) >= 12, (listed, found)
    return sorted(found)


def _flattened(parts: Any) -> list[Any]:
    found = []
    for part in parts:
        if isinstance(part, (APIRoute, Route)):
            found.append(part)
        else:
            found += _flattened(getattr(part, "original_router", part).routes)
    return found


async def test_every_route_needs_its_key_except_the_open_ones(serving: Serving, tmp_path: Path) -> None:
    for name in ("api", "admin"):
        (tmp_path / name).write_text(f"{name}-key-number-1\n")
    access = AccessOptions(api_key_file=tmp_path / "api", admin_key_file=tmp_path / "admin")
    async with serving("ok", access=access) as server:
        for method, path in routes(server):
            statuses = {}
            for sent in ("", "Bearer wrong-key-1", "Bearer api-key-number-1", "Bearer admin-key-number-1"):
                answer = await server.http.request(method, path, headers={"authorization": sent})
                statuses[sent.removeprefix("Bearer ").partition("-")[0]] = answer.status_code
            # A server without adapters refuses their routes with 403, whichever key opens them.
            closed = (401,) if path in ADMIN_PATHS else (401, 403)
            opened = [who for who, status in statuses.items() if status not in closed]
            expected = ["api"]
            if path.startswith("/admin/") or path in ADMIN_PATHS:
                expected = ["admin"]
            elif path in OPEN:
                expected = ["", "wrong", "api", "admin"]
            assert opened == expected, (method, path, statuses)


async def test_new_routes_require_a_key_by_default(
    serving: Serving, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "api").write_text("api-key-number-1\n")
    monkeypatch.setattr(application.health.router, "routes", [*application.health.router.routes])
    application.health.router.add_api_route("/v9/fresh", lambda: {}, methods=["GET"])
    async with serving("ok", access=AccessOptions(api_key_file=tmp_path / "api")) as server:
        answers = [
            await server.http.get("/v9/fresh", headers={"authorization": f"Bearer {key}"})
            for key in ("wrong-key-1", "api-key-number-1")
        ]
        assert [answer.status_code for answer in answers] == [401, 200]


async def test_prompts_and_outputs_never_appear_in_the_logs(
    serving: Serving, token_ids: TokenIds, capfd: pytest.CaptureFixture[str]
) -> None:
    touched = ("quire_engine", "uvicorn", "asyncio", "opentelemetry")
    before = {
        name: (logger := logging.getLogger(name), logger.handlers, logger.level, logger.propagate) for name in touched
    }
    logs.set_up(LogOptions(level="debug", format="json", requests=True))
    try:
        await _say_it_on_every_path(serving, token_ids)
        logging.getLogger("quire_engine").debug("the log was open")
    finally:
        for logger, handlers, level, propagate in before.values():
            logger.handlers, logger.propagate = handlers, propagate
            logger.setLevel(level)
    written = capfd.readouterr()
    assert "the log was open" in written.err and "POST /v1/completions 200" in written.err
    assert "dropped (--lenient)" in written.err and "Traceback" in written.err  # those paths were missing too
    assert MARKER not in written.err + written.out


async def _say_it_on_every_path(serving: Serving, token_ids: TokenIds) -> None:
    messages = [{"role": "user", "content": MARKER}]
    for lenient in (False, True):
        async with serving(MARKER, log_requests=True, lenient=lenient) as server:
            for stream in (False, True):
                await server.complete(prompt=MARKER, stream=stream)
                await server.chat(messages=messages, stream=stream)
                await server.complete(prompt=MARKER, stream=stream, suffix=MARKER, colour=MARKER, stop=[MARKER] * 99)
                await server.chat(messages=[{"role": "king", "content": MARKER}], stream=stream)
                await server.chat(messages=messages, tools=[{"type": MARKER}], chat_template_kwargs={"x": MARKER})
                await server.complete(prompt=MARKER * 1000, user=MARKER, stream=stream)
            for content in (f'{{"prompt": "{MARKER}"', f'["{MARKER}"]', f'"{MARKER}\udcff"'):
                headers = {"content-type": "application/json"}
                body = content.encode("utf-8", "surrogateescape")
                await server.http.post("/v1/completions", content=body, headers=headers)
            await server.http.post("/tokenize", json={"prompt": MARKER})
            await server.http.post("/detokenize", json={"tokens": token_ids(MARKER)})
            for error in (Unavailable("the engine stopped"), InvalidRequest("needs 9 blocks"), RuntimeError("ours")):
                server.engine.refuses = error
                await server.complete(prompt=MARKER)
                await server.chat(messages=messages, stream=True)
            assert server.context.metrics.finished["stop"] > 0
