"""The routes of the served names: GET /v1/models, and the adapters that a client loads and unloads."""

from typing import Annotated, Any, TypeVar

from fastapi import APIRouter
from pydantic import BaseModel, ConfigDict, Field
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response

from quire_common.contract.adapters_file import ADAPTERS_PATH, AdaptersReport, Slots, render_report
from quire_engine.api.adapters import AdapterService
from quire_engine.api.body import BodyLease, body_schema, read_object, validate_large_body
from quire_engine.api.context import Context, context_of
from quire_engine.errors import Forbidden

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


LOAD_PATH, UNLOAD_PATH = "/v1/load_lora_adapter", "/v1/unload_lora_adapter"
_Body = TypeVar("_Body", bound=BaseModel)
_Text = Annotated[str, Field(min_length=1, max_length=4096)]


class LoadAdapterRequest(BaseModel):
    """The body of a request that loads an adapter."""

    model_config = ConfigDict(extra="forbid", strict=True)

    lora_name: _Text
    """The model name in later requests."""
    lora_path: _Text
    """A folder in PEFT's layout, below one of --adapter-roots."""
    load_inplace: bool = False
    """Replace the adapter of this name, if there is one."""
    base_model_name: str | None = None
    """The served model; another name is refused."""


class UnloadAdapterRequest(BaseModel):
    """The body of a request that unloads an adapter."""

    model_config = ConfigDict(extra="forbid", strict=True)

    lora_name: _Text
    lora_int_id: int | None = None
    """Ignored: adapters are known by their names."""


@router.post(LOAD_PATH, openapi_extra=body_schema(LoadAdapterRequest))
async def load_adapter(request: Request) -> Response:
    """Load an adapter from a folder, and answer when it is served."""
    context = context_of(request)
    adapters = _enabled(context)
    with context.bodies.lease() as held:
        body = await _read(request, context, LoadAdapterRequest, held)
    if body.base_model_name is not None:
        context.check_base(body.base_model_name)
    context.lifecycle.check_open()
    context.ready()
    await adapters.load(body.lora_name, body.lora_path, replace=body.load_inplace)
    return PlainTextResponse(f"Success: LoRA adapter '{body.lora_name}' added successfully.")


@router.post(UNLOAD_PATH, openapi_extra=body_schema(UnloadAdapterRequest))
async def unload_adapter(request: Request) -> Response:
    """Stop to serve an adapter; running requests continue."""
    context = context_of(request)
    adapters = _enabled(context)
    with context.bodies.lease() as held:
        body = await _read(request, context, UnloadAdapterRequest, held)
    adapters.unload(body.lora_name)
    return PlainTextResponse(f"Success: LoRA adapter '{body.lora_name}' removed successfully.")


@router.get(ADAPTERS_PATH)
async def report_adapters(request: Request) -> dict[str, Any]:
    """Return the state of every adapter in this engine."""
    adapters = context_of(request).adapters
    none = AdaptersReport(adapters=(), slots=Slots(total=0, used=0), loads_total=0)
    return render_report(none if adapters is None else adapters.report())


async def _read(request: Request, context: Context, schema: type[_Body], held: BodyLease) -> _Body:
    content = await read_object(request, context.options.max_body_bytes, held)
    return await validate_large_body(schema, content, lenient=context.options.lenient, num_bytes=held.num_bytes)


def _enabled(context: Context) -> AdapterService:
    if context.adapters is None:
        raise Forbidden("this server serves no adapters; start it with --enable-lora", code="adapters_disabled")
    return context.adapters
