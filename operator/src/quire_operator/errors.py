"""User errors and their messages.

    UserError                  printed without a traceback; exit code 2
    ├── ClusterProblem         no usable connection to a cluster; exit code 1
    └── quire_cli.errors       the errors of the quire command

Every other exception is a bug.
"""

from collections.abc import Sequence


class UserError(Exception):
    """The base of all user errors: a line that says what is wrong and where, details, and a hint how to fix it."""

    exit_code = 2

    def __init__(self, message: str, *, details: Sequence[str] = (), hint: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.details = tuple(details)
        self.hint = hint


class ClusterProblem(UserError):
    """No cluster is configured, or its configuration cannot be used."""

    exit_code = 1
