"""Errors in what a user wrote or asked for, with the message that is printed.

    UserError                  printed as it is, without a traceback; exit code 2
    ├── ClusterProblem         no connection to a cluster, or one that cannot be used
    └── quire_cli.errors       the errors of the quire command

Every other exception is a bug.
"""

from collections.abc import Sequence


class UserError(Exception):
    """The root: one line that says what was wrong and where, details below it, and what would be right."""

    exit_code = 2

    def __init__(self, message: str, *, details: Sequence[str] = (), hint: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.details = tuple(details)
        self.hint = hint


class ClusterProblem(UserError):
    """There is no way to a cluster, or the one there is can't be worked with."""

    exit_code = 1
