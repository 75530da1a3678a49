"""The routes GET /v1/models and /v1/models/{name}."""

from typing import Any

from fastapi import APIRouter
from starlette.requests import Request

from quire_engine.server.context import Context, context_of

router = APIRouter()


@router.get("/v1/models")
async def list_models(request: Request) -> dict[str, Any]:
    """Return the names under which the model is served."""
    context = context_of(request)
    return {"object": "list", "data": [_card(context, name) for name in context.model_names]}


@router.get("/v1/models/{name:path}")
async def get_model(request: Request, name: str) -> dict[str, Any]:
    """Return the model, if it is served under this name."""
    context = context_of(request)
    context.check_model(name)
    return _card(context, name)


def _card(context: Context, name: str) -> dict[str, Any]:
    ready = context.engine.ready
    return {
        "id": name,
        "object": "model",
        "created": context.created,
        "owned_by": "quire",
        "root": context.model_names[0],
        "parent": None,
        "max_model_len": None if ready is None else ready.max_model_len,
    }
