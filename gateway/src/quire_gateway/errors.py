"""What the gateway itself has to say no to, in the shape OpenAI's clients expect.

    GatewayError               an HTTP status, and the body {"error": {message, type, param, code}}
    ├── BadRequest             400  not JSON, no model named
    ├── BodyTooLarge           413
    ├── Unauthorized           401  no key, or none of the file's; WWW-Authenticate
    ├── RequestTimeout         408  the body came too slowly
    ├── UnknownModel           404
    ├── NotFound               404  no such path here
    ├── NoReplica              503  none became ready in time, or too many wait already; Retry-After
    ├── UpstreamFailed         502  a replica took the request and died before it answered
    └── ShuttingDown           503  this gateway stops before an answer came

    ConfigProblem              the command line: every reason at once; exit code 2

Anything else that is raised is our bug, and answered with 500.
"""

from collections.abc import Sequence

import msgspec


class GatewayError(Exception):
    """An answer other than the one that was asked for."""

    status = 500
    type = "internal_error"
    code: str | None = None
    param: str | None = None

    def __init__(self, message: str, *, retry_after_seconds: int | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.retry_after_seconds = retry_after_seconds

    def body(self) -> bytes:
        """As OpenAI's API writes errors."""
        return msgspec.json.encode(
            {"error": {"message": self.message, "type": self.type, "param": self.param, "code": self.code}}
        )


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


class NoReplica(GatewayError):
    status = 503
    type = "service_unavailable_error"
    code = "no_replica_ready"


class UpstreamFailed(GatewayError):
    status = 502
    type = "upstream_error"
    code = "replica_failed"


class ShuttingDown(GatewayError):
    status = 503
    type = "service_unavailable_error"
    code = "shutting_down"


class ConfigProblem(Exception):
    """The gateway can't be started like this."""

    def __init__(self, problems: Sequence[str]) -> None:
        super().__init__("; ".join(problems))
        self.problems = tuple(problems)
