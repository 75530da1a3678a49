"""Errors around the scenarios that the reader can fix; each message says what is wrong and what is accepted.

E2EError
├── TargetUnavailable   there is no cluster to run on, or a required setting is missing
├── CommandFailed       kubectl or helm failed; the message is its output
└── ApiError            the API server rejected a request, or did not answer
    └── NotFound        the object does not exist

``NotInTime`` is not an E2EError, because it is the result of a scenario.
"""


class E2EError(Exception):
    """The root of all errors that a user can fix."""


class TargetUnavailable(E2EError):
    """There is no cluster to run on, or a required setting is missing."""


class CommandFailed(E2EError):
    """kubectl or helm exited with a non-zero status."""


class ApiError(E2EError):
    """The API server rejected a request; without a status it did not answer."""

    def __init__(self, message: str, *, status: int | None) -> None:
        super().__init__(message)
        self.status = status


class NotFound(ApiError):
    """The object does not exist."""


class NotInTime(AssertionError):
    """An expected state did not occur; the message contains all known facts."""
