"""Errors as the APIs of OpenAI and Anthropic write them."""

from typing import Any


def error_body(message: str, *, type: str, param: str | None, code: str | None) -> dict[str, Any]:
    """Return the JSON object that OpenAI's clients expect with an error status."""
    return {"error": {"message": message, "type": type, "param": param, "code": code}}


MESSAGES_PATH = "/v1/messages"

_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "invalid_request_error",
    413: "request_too_large",
    415: "invalid_request_error",
    429: "rate_limit_error",
    502: "api_error",
    503: "overloaded_error",
    504: "timeout_error",
}


def is_messages_path(path: str) -> bool:
    """Return whether the clients of a path expect errors in Anthropic's form."""
    return path == MESSAGES_PATH or path.startswith(f"{MESSAGES_PATH}/")


def anthropic_error_type(status: int) -> str:
    """Return the type of an error with this HTTP status."""
    return _TYPES.get(status, "invalid_request_error" if 400 <= status < 500 else "api_error")
