"""Errors as OpenAI's clients expect them: the one place where an error of ours becomes an HTTP answer.

An answer is at most 4 KiB whatever the client sent, so that a small bad request cannot make a large reply.
"""

from collections.abc import Sequence
from typing import Any

import msgspec
from starlette.responses import Response

from quire_engine.errors import RequestError

MAX_REASONS = 10
_MAX_REASON_CHARACTERS = 300
_MAX_MESSAGE_CHARACTERS = 3300
"""With the JSON around it and two-byte characters mostly absent, below 4 KiB; ``error_body`` makes sure."""
_MAX_BODY_BYTES = 4096


def error_object(error: RequestError) -> dict[str, Any]:
    return {
        "error": {
            "message": shortened(error.message, _MAX_MESSAGE_CHARACTERS),
            "type": error.type,
            "param": None if error.param is None else shortened(error.param, 100),
            "code": error.code,
        }
    }


def error_body(error: RequestError) -> bytes:
    answer = error_object(error)
    body = msgspec.json.encode(answer)
    while len(body) > _MAX_BODY_BYTES:  # characters of several bytes
        message = answer["error"]["message"]
        answer["error"]["message"] = shortened(message, len(message) * 3 // 4)
        body = msgspec.json.encode(answer)
    return body


def error_response(error: RequestError) -> Response:
    headers = {}
    if error.retry_after_seconds is not None:
        headers["retry-after"] = str(error.retry_after_seconds)
    if error.status == 401:
        headers["www-authenticate"] = "Bearer"
    return Response(error_body(error), status_code=error.status, media_type="application/json", headers=headers)


def joined_reasons(reasons: Sequence[str], total: int) -> str:
    """The first reasons as one message, and how many more of the ``total`` there are."""
    shown = [shortened(reason, _MAX_REASON_CHARACTERS) for reason in reasons[:MAX_REASONS]]
    if total > MAX_REASONS:
        shown[-1] = f"and {total - MAX_REASONS + 1} more"
    return "; ".join(shown)


def shortened(text: str, limit: int) -> str:
    return text if len(text) <= limit else text[: limit - 1] + "…"
