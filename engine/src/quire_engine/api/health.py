"""The routes for the operators of a server: probes, metrics, version and the drain."""

from typing import Any

from fastapi import APIRouter
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from quire_engine import __version__
from quire_engine.api.context import Context, context_of

router = APIRouter()


@router.get("/livez")
async def livez(request: Request) -> Response:
    """Return 200 while this server can recover by itself; 503 means that it must be restarted."""
    context = context_of(request)
    if context.engine.failure is not None:
        return JSONResponse({"status": "failed", "reason": context.engine.failure}, status_code=503)
    return JSONResponse({"status": "live"})


@router.get("/readyz")
async def readyz(request: Request) -> Response:
    """Return 200 once the engine has produced a token, and while requests are accepted."""
    return _readiness(context_of(request))


@router.get("/health")
async def health(request: Request) -> Response:
    """Return the same as /readyz."""
    return _readiness(context_of(request))


def _readiness(context: Context) -> Response:
    if context.lifecycle.draining:
        status: dict[str, Any] = {"status": "draining", "in_flight": context.lifecycle.in_flight}
        return JSONResponse(status, status_code=503)
    if context.engine.ready is None:
        return JSONResponse({"status": context.engine.state}, status_code=503)
    return JSONResponse({"status": "ready"})


@router.get("/metrics")
async def metrics(request: Request) -> Response:
    """Return the metrics in Prometheus' text format, whichever other formats a scraper accepts.

    In OpenMetrics the client library writes ``vllm_…`` for ``vllm:…``, and no dashboard would find its metrics.
    """
    return Response(request.app.state.exposition.text(), headers={"content-type": CONTENT_TYPE_PLAIN_0_0_4})


@router.get("/version")
async def version(request: Request) -> dict[str, Any]:
    """Return the version, and the level at which the CPU is used with what was left out and why."""
    limits = context_of(request).engine.cpu
    return {"version": __version__, "cpu": None if limits is None else limits.as_json()}


@router.post("/admin/drain")
async def drain(request: Request) -> dict[str, Any]:
    """Accept no new requests; running ones may finish. The process stays until it gets a signal to end."""
    lifecycle = context_of(request).lifecycle
    lifecycle.begin_drain()
    return {"status": "draining", "in_flight": lifecycle.in_flight}


@router.post("/admin/cache/reset")
async def reset_cache(request: Request) -> dict[str, str]:
    """Drop every cached prefix that no running request uses."""
    context = context_of(request)
    context.ready()
    context.engine.reset_prefix_cache()
    return {"status": "reset"}
