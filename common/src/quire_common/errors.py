"""Errors in what a person configured: raised here, shown once by the command that read it.

ConfigurationError      every problem that was found
├── FlagsError          command line and environment
├── KeyFileError        a file of API keys
└── TlsError            certificate, private key or certificate authorities
"""

from collections.abc import Iterable


class ConfigurationError(Exception):
    """A configuration that cannot be used, with all problems found in it."""

    exit_code = 2
    """Tells the caller that a restart with the same configuration would fail again."""

    def __init__(self, problems: str | Iterable[str]) -> None:
        self.problems = (problems,) if isinstance(problems, str) else tuple(problems)
        super().__init__("\n".join(self.problems))


class FlagsError(ConfigurationError): ...


class KeyFileError(ConfigurationError):
    """Its problems name lines and never quote them."""


class TlsError(ConfigurationError): ...
