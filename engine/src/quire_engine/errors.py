"""What a person can do wrong, and what the engine then says: raised anywhere, shown in one place each.

    EngineError
    ├── StartError              printed by __main__ as it is, without a traceback; the process ends with exit_code
    │   ├── ModelFolderError    the folder, its config, tokenizer, template or weights
    │   ├── TracingError        what OpenTelemetry needs is not there
    │   ├── AddressError        the address to listen on
    │   ├── DeviceError         a GPU that ran out of memory or failed, at the start or in a later step
    │   └── EngineStartError    what the engine process said before it ended
    ├── FetchError              printed by quire-fetch: a model that cannot be downloaded, with details and a hint
    └── RequestError            answered by server.problems in OpenAI's error shape
        ├── InvalidRequest      400
        ├── Unauthorized        401
        ├── Forbidden           403
        ├── NotFound            404
        ├── MethodNotAllowed    405
        ├── RequestTimeout      408: the client sends its request too slowly
        ├── BodyTooLarge        413
        ├── UnsupportedMedia    415
        ├── Overloaded          429, with Retry-After
        ├── InternalError       500: a fault of ours; the message tells nothing of the inside
        └── Unavailable         503, with Retry-After

Unusable flags, key files and certificates raise ``quire_common.errors.ConfigurationError``, which ``__main__`` prints
with all its problems. A message says what is wrong, where, and what is expected. Any other exception is a bug.
"""

from collections.abc import Sequence
from typing import ClassVar


class EngineError(Exception):
    """The root; ``str(error)`` is the whole message for the person."""


class StartError(EngineError):
    """The process cannot start. Exit code 2 tells whoever restarts it that no restart will mend this."""

    exit_code: int = 1


class ModelFolderError(StartError):
    """The model folder cannot be served as it is; no restart mends that."""

    exit_code = 2


class TracingError(StartError):
    """Spans are wanted, but what sends them is not installed."""

    exit_code = 2


class AddressError(StartError):
    """The address cannot be listened on."""


class DeviceError(StartError):
    """The GPU ran out of memory, or failed. In a step it ends the engine process, and another is started."""


class EngineStartError(StartError):
    """The engine process did not get ready."""

    def __init__(self, message: str, exit_code: int = 1) -> None:
        super().__init__(message)
        self.exit_code = exit_code


class FetchError(EngineError):
    """A model cannot be downloaded."""

    exit_code = 2

    def __init__(self, message: str, *, details: Sequence[str] = (), hint: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.details = tuple(details)
        self.hint = hint


class RequestError(EngineError):
    """A request cannot be served; class attributes say how HTTP tells it."""

    status: ClassVar[int] = 500
    type: ClassVar[str] = "server_error"
    default_code: ClassVar[str | None] = None

    def __init__(
        self,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        retry_after_seconds: int | None = None,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        self.code = code or self.default_code
        self.retry_after_seconds = retry_after_seconds


class InvalidRequest(RequestError):
    status = 400
    type = "invalid_request_error"


class Unauthorized(RequestError):
    status = 401
    type = "authentication_error"
    default_code = "invalid_api_key"


class Forbidden(RequestError):
    status = 403
    type = "permission_error"


class NotFound(RequestError):
    status = 404
    type = "invalid_request_error"


class MethodNotAllowed(RequestError):
    status = 405
    type = "invalid_request_error"


class RequestTimeout(RequestError):
    status = 408
    type = "invalid_request_error"


class BodyTooLarge(RequestError):
    status = 413
    type = "invalid_request_error"
    default_code = "body_too_large"


class UnsupportedMedia(RequestError):
    status = 415
    type = "invalid_request_error"


class Overloaded(RequestError):
    status = 429
    type = "rate_limit_error"
    default_code = "rate_limit_exceeded"


class InternalError(RequestError):
    status = 500


class Unavailable(RequestError):
    status = 503
    default_code = "unavailable"
