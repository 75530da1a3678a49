"""The errors of requests to the API server, and the mapping of its answers to them."""

import json
from collections.abc import Mapping

_MAX_MESSAGE = 1000
# A pod template with a field that the schema does not have fails before validation, as an internal error of the server.
_UNKNOWN_FIELD = "failed to create typed patch object"


class ClusterError(Exception):
    """A request to the API server failed.

    ClusterError
    ├── Conflict        another client changed the object: read it again, at once
    ├── Refused         the server rejects this object: the user must fix it
    ├── QuotaExceeded   the namespace's quota is exhausted
    ├── Forbidden       the operator lacks a permission
    │   └── PartlyForbidden    for some of several namespaces
    ├── NotFound        the object, its namespace or its kind does not exist
    ├── Throttled       the server requests a delay
    ├── Unavailable     the server failed, did not answer or could not be reached
    └── NotLeading      this process may not write: it is not certain that it holds the Lease
    """


class Conflict(ClusterError):
    """Another client changed or created the object in the meantime."""


class Refused(ClusterError):
    """The server rejects this object; only a changed object can succeed."""


class QuotaExceeded(ClusterError):
    """The quota of the namespace is exhausted."""


class Forbidden(ClusterError):
    """The operator lacks a permission."""


class PartlyForbidden(Forbidden):
    """A list is complete except for the objects in ``namespaces``."""

    def __init__(self, message: str, *, namespaces: frozenset[str]) -> None:
        super().__init__(message)
        self.namespaces = namespaces


class NotFound(ClusterError):
    """The object, its namespace or its kind does not exist."""


class Throttled(ClusterError):
    """The server requests a delay of ``after_seconds``; None if it names no time."""

    def __init__(self, message: str, *, after_seconds: float | None) -> None:
        super().__init__(message)
        self.after_seconds = after_seconds


class Unavailable(ClusterError):
    """The server failed, did not answer in time or could not be reached."""


class NotLeading(ClusterError):
    """The process may not write because it is not certain that it is the leader."""


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
