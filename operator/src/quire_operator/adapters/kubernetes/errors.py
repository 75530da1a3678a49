"""The mapping of HTTP statuses and messages of the API server to ``ports.ClusterError``, in one place."""

import json
from collections.abc import Mapping

from quire_operator.ports import (
    ClusterError,
    Conflict,
    Forbidden,
    NotFound,
    QuotaExceeded,
    Refused,
    Throttled,
    Unavailable,
)

_MAX_MESSAGE = 1000
# A pod template with a field that the schema does not have fails before validation, as an internal error of the server.
_UNKNOWN_FIELD = "failed to create typed patch object"


def error_of(status: int, body: bytes, headers: Mapping[str, str]) -> ClusterError:
    """Return the error for an answer with a status of 400 or above."""
    message = _message(body) or f"the API server answered {status}"
    match status:
        case 401:
            return Forbidden(f"our credentials were not accepted: {message}")
        case 403:
            return _forbidden(message)
        case 404:
            return NotFound(message)
        case 409:
            return Conflict(message)
        case 429:
            return Throttled(message, after_seconds=_retry_after(headers))
        case _ if status < 500 or _UNKNOWN_FIELD in message:
            return Refused(message)
        case _:
            return Unavailable(message)


def _forbidden(message: str) -> ClusterError:
    if "exceeded quota" in message:
        return QuotaExceeded(message)
    if "because it is being terminated" in message:
        return NotFound(message)
    if "admission webhook" in message or "ValidatingAdmissionPolicy" in message or "violates PodSecurity" in message:
        return Refused(message)
    return Forbidden(message)


def _message(body: bytes) -> str:
    text = body.decode(errors="replace")
    try:
        parsed = json.loads(text)
    except ValueError:
        parsed = None
    if isinstance(parsed, Mapping):
        text = str(parsed.get("message", ""))
    return text.strip()[:_MAX_MESSAGE]


def _retry_after(headers: Mapping[str, str]) -> float | None:
    value = headers.get("Retry-After", "")
    return float(value) if value.isdecimal() else None
