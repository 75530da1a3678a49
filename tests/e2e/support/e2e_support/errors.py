"""What can be wrong around the scenarios and is the reader's to mend; each message says what, and what would be right.

E2EError
├── TargetUnavailable   there is no cluster to run on, or something that it needs is not given
├── CommandFailed       kubectl or helm refused; the message is what it wrote
└── ApiError            the API server refused a request, or gave no answer
    └── NotFound        there is no such object

``NotInTime`` is no E2EError: it is the verdict of a scenario.
"""


class E2EError(Exception):
    """The root: whatever a person can act on."""


class TargetUnavailable(E2EError):
    """There is no cluster to run on, or something that it needs is not given."""


class CommandFailed(E2EError):
    """kubectl or helm ended with a non-zero status."""


class ApiError(E2EError):
    """The API server refused a request; without a status it gave no answer."""

    def __init__(self, message: str, *, status: int | None) -> None:
        super().__init__(message)
        self.status = status


class NotFound(ApiError):
    """There is no such object."""


class NotInTime(AssertionError):
    """What a scenario waited for did not come; the message has all that is known of why."""
