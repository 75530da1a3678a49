"""The tree of user errors: they are raised anywhere, and each branch is shown in one place.

    EngineError
    ├── StartError              printed by __main__ without a traceback; the process ends with exit_code
    │   ├── ModelFolderError    the folder, its config, tokenizer, template or weights
    │   ├── TracingError        the packages of OpenTelemetry are missing
    │   ├── AddressError        the address to listen on
    │   ├── DeviceError         a GPU ran out of memory or failed, at the start or in a later step
    │   └── EngineStartError    the engine process ended before it was ready
    ├── AdapterError            an adapter that cannot be served; the base model and other adapters can
    ├── FetchError              printed by quire-fetch: a model that cannot be downloaded, with details and a hint
    └── RequestError            server.http.problems turns it into OpenAI's error object
        ├── InvalidRequest      400
        ├── Unauthorized        401
        ├── Forbidden           403
        ├── NotFound            404
        ├── MethodNotAllowed    405
        ├── RequestTimeout      408: the client sends its request too slowly
        ├── BodyTooLarge        413
        ├── UnsupportedMedia    415
        ├── Overloaded          429, with Retry-After
        ├── InternalError       500: a bug; the message contains no internals
        └── Unavailable         503, with Retry-After

Unusable flags, key files and certificates raise ``quire_common.errors.ConfigurationError``, which ``__main__`` prints
with all its problems. A message says what is wrong, where, and what is expected. Any other exception is a bug.
"""

from collections.abc import Sequence
from typing import ClassVar

from quire_common.contract.adapters_file import AdapterFailure
from quire_common.contract.engine import KEY_LIMIT

GROUP_LOST = 75
"""The exit status of an engine process that ends because another rank of its group was lost."""


class EngineError(Exception):
    """The root of the tree; ``str(error)`` is the whole message for the user."""


class StartError(EngineError):
    """An error that prevents the process from starting."""

    exit_code: int = 1
    """The exit status; 2 means that a restart cannot help."""


class ModelFolderError(StartError):
    """A model folder that cannot be served."""

    exit_code = 2


class TracingError(StartError):
    """Missing packages for the tracing that a flag requests."""

    exit_code = 2


class AddressError(StartError):
    """An address on which the server cannot listen."""


class DeviceError(StartError):
    """A GPU that ran out of memory or failed. In a step it ends the engine process, and another one is started."""


class EngineStartError(StartError):
    """An engine process that ended before it was ready."""

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


class AdapterError(EngineError):
    """An adapter that cannot be served."""

    def __init__(self, reason: AdapterFailure, message: str) -> None:
        super().__init__(message)
        self.reason = reason


class RequestError(EngineError):
    """A request that cannot be served; the class attributes are its HTTP status, OpenAI type and default code."""

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
    """A request that this model and server cannot accept."""

    status = 400
    type = "invalid_request_error"


class Unauthorized(RequestError):
    """A request without a valid API key or client certificate."""

    status = 401
    type = "authentication_error"
    default_code = "invalid_api_key"


class Forbidden(RequestError):
    """A request to a route that is not open to this client."""

    status = 403
    type = "permission_error"


class NotFound(RequestError):
    """A request for a route or model that does not exist."""

    status = 404
    type = "invalid_request_error"


class MethodNotAllowed(RequestError):
    """A request with a method that the route does not accept."""

    status = 405
    type = "invalid_request_error"


class RequestTimeout(RequestError):
    """A client that sends its request or reads its answer too slowly."""

    status = 408
    type = "invalid_request_error"


class BodyTooLarge(RequestError):
    """A body above the size limit."""

    status = 413
    type = "invalid_request_error"
    default_code = "body_too_large"


class UnsupportedMedia(RequestError):
    """A body that is not plain JSON."""

    status = 415
    type = "invalid_request_error"


class Overloaded(RequestError):
    """A request above the bound of the queue or the limits of its key."""

    status = 429
    type = "rate_limit_error"
    default_code = KEY_LIMIT


class InternalError(RequestError):
    """A request that failed because of a bug."""

    status = 500


class Unavailable(RequestError):
    """A request that the server cannot serve now."""

    status = 503
    default_code = "unavailable"
