"""Error responses in the form that the clients of a route expect: the one place where a RequestError becomes HTTP."""

from collections.abc import Sequence
from typing import Any

import msgspec
from starlette.responses import Response

from quire_common.api_errors import anthropic_error_type, is_messages_path
from quire_engine.errors import RequestError

MAX_REASONS = 10
_MAX_REASON_CHARACTERS = 300
_MAX_MESSAGE_CHARACTERS = 3300
"""With the JSON around it and two-byte characters mostly absent, below 4 KiB; ``error_body`` makes sure."""
_MAX_BODY_BYTES = 4096


def error_object(error: RequestError, path: str = "") -> dict[str, Any]:
    """Return the error as the JSON object that clients of the route expect: message, type, param and code."""
    fields = {
        "message": shortened(error.message, _MAX_MESSAGE_CHARACTERS),
        "type": error.type,
        "param": None if error.param is None else shortened(error.param, 100),
        "code": error.code,
    }
    if not is_messages_path(path):
        return {"error": fields}
    return {"type": "error", "error": {**fields, "type": anthropic_error_type(error.status)}}


def error_body(error: RequestError, path: str = "") -> bytes:
    """Return the error as JSON of at most 4 KiB."""
    answer = error_object(error, path)
    body = msgspec.json.encode(answer)
    while len(body) > _MAX_BODY_BYTES:  # characters of several bytes
        message = answer["error"]["message"]
        answer["error"]["message"] = shortened(message, len(message) * 3 // 4)
        body = msgspec.json.encode(answer)
    return body


def error_response(error: RequestError, path: str) -> Response:
    """Return the HTTP response to an error, with Retry-After where the error has one."""
    headers = {}
    if error.retry_after_seconds is not None:
        headers["retry-after"] = str(error.retry_after_seconds)
    if error.status == 401:
        headers["www-authenticate"] = "Bearer"
    return Response(error_body(error, path), status_code=error.status, media_type="application/json", headers=headers)


def joined_reasons(reasons: Sequence[str], total: int) -> str:
    """Return the first reasons as one message, with the number of the others of ``total``."""
    shown = [shortened(reason, _MAX_REASON_CHARACTERS) for reason in reasons[:MAX_REASONS]]
    if total > MAX_REASONS:
        shown[-1] = f"and {total - MAX_REASONS + 1} more"
    return "; ".join(shown)


def shortened(text: str, limit: int) -> str:
    """Return at most ``limit`` characters, the last of which is an ellipsis if any were cut."""
    return text if len(text) <= limit else text[: limit - 1] + "…"
