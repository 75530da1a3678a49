"""The page /docs: Swagger UI over /openapi.json.

Its files come from a package, so that the page also works without internet access; FastAPI's own page uses a CDN.
"""

from functools import cache
from importlib.resources import files

from fastapi import APIRouter
from fastapi.openapi.docs import get_swagger_ui_html
from starlette.requests import Request
from starlette.responses import Response

router = APIRouter(include_in_schema=False)

_FILES = {
    "swagger-ui-bundle.js": "text/javascript",
    "swagger-ui.css": "text/css",
    "favicon-32x32.png": "image/png",
}
_YEAR = "private, max-age=31536000, immutable"


@router.get("/docs")
async def page(request: Request) -> Response:
    """Return the page, on which every route can be tried in the browser."""
    prefix: str = request.app.state.context.options.root_path
    script, style, icon = (f"{prefix}/docs/{name}" for name in _FILES)
    return get_swagger_ui_html(
        openapi_url=f"{prefix}/openapi.json",
        title="quire-engine",
        swagger_js_url=script,
        swagger_css_url=style,
        swagger_favicon_url=icon,
        swagger_ui_parameters={"tryItOutEnabled": True, "persistAuthorization": True},
    )


def _serve(name: str, media_type: str) -> None:
    @router.get(f"/docs/{name}")
    async def file() -> Response:
        return Response(_read(name), media_type=media_type, headers={"cache-control": _YEAR})


for _name, _media_type in _FILES.items():
    _serve(_name, _media_type)


@cache
def _read(name: str) -> bytes:
    return files("fastapi_swagger.resources").joinpath(name).read_bytes()
