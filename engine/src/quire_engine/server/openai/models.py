"""The routes GET /v1/models and /v1/models/{name}."""

from typing import Any

from fastapi import APIRouter
from starlette.requests import Request

from quire_engine.server.context import Context, context_of

router = APIRouter()


@router.get("/v1/models")
async def list_models(request: Request) -> dict[str, Any]:
    """Return the names under which the model is served, and its adapters."""
    context = context_of(request)
    cards = [_card(context, name) for name in context.model_names]
    if context.adapters is not None:
        cards += [_card(context, name, source) for name, source in context.adapters.sources()]
    return {"object": "list", "data": cards}


@router.get("/v1/models/{name:path}")
async def get_model(request: Request, name: str) -> dict[str, Any]:
    """Return the model or the adapter that is served under this name."""
    context = context_of(request)
    if context.adapters is not None and name not in context.model_names:
        source = next((source for own, source in context.adapters.sources() if own == name), None)
        if source is not None:
            return _card(context, name, source)
    context.check_base(name)
    return _card(context, name)


def _card(context: Context, name: str, adapter_source: str | None = None) -> dict[str, Any]:
    """Return the card of the model, or of an adapter of it."""
    ready = context.engine.ready
    return {
        "id": name,
        "object": "model",
        "created": context.created,
        "owned_by": "quire",
        "root": context.model_names[0] if adapter_source is None else adapter_source,
        "parent": None if adapter_source is None else context.model_names[0],
        "max_model_len": None if ready is None else ready.max_model_len,
    }
