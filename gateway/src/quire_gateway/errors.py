"""The errors that the gateway itself answers with, in the shape that clients of OpenAI expect.

Below ``/v1/messages`` it is Anthropic's shape.

    GatewayError               an HTTP status, and the body {"error": {message, type, param, code}}
    ├── BadRequest             400  the body is not JSON, or names no model
    ├── BodyTooLarge           413
    ├── Unauthorized           401  no API key, or an unknown one; with WWW-Authenticate
    ├── RateLimited            429  over the limits of an API key, or over its share of the memory; with Retry-After
    ├── RequestTimeout         408  the body came too slowly
    ├── UnknownModel           404
    ├── NotFound               404  an unknown path
    ├── ResponsesNotStored     404  a response by its id
    ├── NoReplica              503  no replica became ready in time, or too many requests wait; with Retry-After
    ├── BodyMemoryFull         503  the bodies of the requests in flight use all memory for bodies; with Retry-After
    ├── TooManyConnections     503  a connection beyond the bound; with Retry-After
    ├── UpstreamFailed         502  replicas died while they worked on the request; clients should not repeat it
    └── ShuttingDown           503  this gateway stops before an answer came

Errors in the configuration are ``quire_common.errors.ConfigurationError``: exit code 2, with every problem. Any other
exception is a bug, and answered with 500.
"""

import msgspec
from aiohttp import web

from quire_common.api_errors import anthropic_error_type, error_body, is_messages_path
from quire_common.contract.engine import KEY_LIMIT, NOT_STORED
from quire_gateway import headers


class GatewayError(Exception):
    """An error answer to a request."""

    status = 500
    type = "internal_error"
    code: str | None = None
    param: str | None = None
    should_retry: bool | None = None
    """The header ``x-should-retry``, which OpenAI's clients follow; None leaves the decision to the client."""

    def __init__(self, message: str, *, retry_after_seconds: int | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.retry_after_seconds = retry_after_seconds

    def body(self, path: str) -> bytes:
        """Return the JSON body of the answer, in the form that clients of the path expect."""
        body = error_body(self.message, type=self.type, param=self.param, code=self.code)
        if is_messages_path(path):
            body = {"type": "error", "error": {**body["error"], "type": anthropic_error_type(self.status)}}
        return msgspec.json.encode(body)


class BadRequest(GatewayError):
    status = 400
    type = "invalid_request_error"

    def __init__(self, message: str, *, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.param, self.code = param, code


class BodyTooLarge(GatewayError):
    status = 413
    type = "invalid_request_error"
    code = "body_too_large"


class Unauthorized(GatewayError):
    status = 401
    type = "authentication_error"

    def __init__(self, message: str, *, code: str) -> None:
        super().__init__(message)
        self.code = code


class RateLimited(GatewayError):
    status = 429
    type = "rate_limit_error"
    code = KEY_LIMIT


class RequestTimeout(GatewayError):
    status = 408
    type = "invalid_request_error"
    code = "request_timeout"


class UnknownModel(GatewayError):
    status = 404
    type = "invalid_request_error"
    code = "model_not_found"
    param = "model"


class NotFound(GatewayError):
    status = 404
    type = "invalid_request_error"
    code = "not_found"


class ResponsesNotStored(GatewayError):
    status = 404
    type = "invalid_request_error"
    code = NOT_STORED


class NoReplica(GatewayError):
    status = 503
    type = "service_unavailable_error"
    code = "no_replica_ready"


class BodyMemoryFull(GatewayError):
    status = 503
    type = "service_unavailable_error"
    code = "body_memory_full"


class TooManyConnections(GatewayError):
    status = 503
    type = "service_unavailable_error"
    code = "too_many_connections"


class UpstreamFailed(GatewayError):
    status = 502
    type = "upstream_error"
    code = "replica_failed"
    should_retry = False


class ShuttingDown(GatewayError):
    status = 503
    type = "service_unavailable_error"
    code = "shutting_down"


class _Error(msgspec.Struct):
    """The field of an error that the gateway reads."""

    code: str | None = None


class _ErrorBody(msgspec.Struct):
    """The body of an error answer or an error event; that of the Responses API has the code at its top."""

    error: _Error | None = None
    code: str | None = None


def error_code(body: bytes) -> str | None:
    """Return the code of a replica's error in OpenAI's shape; None if the body has another shape."""
    try:
        found = msgspec.json.decode(body, type=_ErrorBody)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None
    return found.code if found.error is None else found.error.code


def error_response(request: web.BaseRequest, error: GatewayError, *, status: int | None = None) -> web.Response:
    """Return the answer to a request that failed."""
    response = web.Response(
        status=status or error.status, body=error.body(request.path), content_type="application/json"
    )
    response.headers["Server"] = headers.SERVER
    response.headers[headers.REQUEST_ID] = headers.request_id(request)
    if error.retry_after_seconds is not None:
        response.headers["Retry-After"] = str(error.retry_after_seconds)
    if error.should_retry is not None:
        response.headers["x-should-retry"] = str(error.should_retry).lower()
    if isinstance(error, Unauthorized):
        response.headers["WWW-Authenticate"] = "Bearer"
    return response
