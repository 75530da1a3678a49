"""API keys in a file, one per line, reloaded when the file changes. Keys are compared by SHA-256 in constant time.

A line is a key, KEY or sha256:HEX, with optional settings in front of it, separated by spaces::

    name=team-a requests_per_minute=600 tokens_per_minute=200000 max_concurrent=32 sha256:HEX

The name is the tenant; NAME:KEY is short for name=NAME KEY. Keys of one name share one allowance, so their lines must
set the same limits. A key has one name. Empty lines and lines that start with # are ignored.

The engine and the gateway read the same format, so that one Secret can serve both. An engine enforces the limits for
itself, a gateway over all replicas.
"""

import hashlib
import hmac
import logging
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from quire_common.errors import KeyFileError
from quire_common.watched_files import WatchedFiles

_log = logging.getLogger(__name__)

_NAME = r"[A-Za-z0-9._-]{1,64}"
_KEY = re.compile(
    rf"(?:(?!sha256:)(?P<name>{_NAME}):)?(?:sha256:(?P<hex>[0-9a-fA-F]{{64}})|(?P<key>(?!sha256:)[!-~]{{8,512}}))"
)
_SETTING = re.compile(r"(?P<setting>name|requests_per_minute|tokens_per_minute|max_concurrent)=(?P<value>.*)")
_UNKNOWN_SETTING = re.compile(r"[a-z_]+=[^=].*")
"""A misspelt setting: a key may contain =, but no key starts like this."""
_NUMBER = re.compile(r"[1-9][0-9]{0,11}")
_EXPECTED = (
    "expected KEY, sha256:HEX, NAME:KEY or NAME:sha256:HEX, where a key is 8 to 512 printable characters without "
    "spaces; name=, requests_per_minute=, tokens_per_minute= and max_concurrent= may precede it"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class KeyLimits:
    """The limits of a tenant; None means no limit."""

    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None
    """Prompt tokens and generated tokens together."""
    max_concurrent: int | None = None
    """Sequences (prompts times n) that run at once."""


UNLIMITED = KeyLimits()


@dataclass(frozen=True, slots=True, kw_only=True)
class Key:
    """One entry of a key file."""

    name: str | None
    digest: bytes
    limits: KeyLimits = UNLIMITED

    @property
    def tenant(self) -> str:
        """The name, or the start of the hash: enough to tell keys apart, and of no use to a person who reads a log."""
        return self.name or f"key-{self.digest.hex()[:8]}"


def parse_keys(text: str, origin: str) -> tuple[Key, ...]:
    """Return the keys of a file's text. Raise ``KeyFileError`` with one problem per wrong line."""
    keys: list[Key] = []
    problems: list[str] = []
    first_of: dict[str, tuple[int, KeyLimits]] = {}
    tenant_of: dict[bytes, tuple[int, str]] = {}
    for number, line in enumerate(text.splitlines(), start=1):
        words = line.split()
        if not words or words[0].startswith("#"):
            continue
        try:
            key = _parse_line(words)
        except ValueError as error:
            problems.append(f"{origin}, line {number}: {error}")
            continue
        first, limits = first_of.setdefault(key.tenant, (number, key.limits))
        if limits != key.limits:
            problems.append(f"{origin}, lines {first} and {number}: keys of one name must have the same limits")
        first, tenant = tenant_of.setdefault(key.digest, (number, key.tenant))
        if tenant != key.tenant:
            problems.append(
                f"{origin}, lines {first} and {number}: {tenant} and {key.tenant} have the same key; remove one of them"
            )
        keys.append(key)
    if problems or not keys:
        raise KeyFileError(problems or f"{origin} contains no key")
    return tuple(keys)


def _parse_line(words: list[str]) -> Key:
    *settings, last = words
    values: dict[str, str] = {}
    for word in settings:
        match = _SETTING.fullmatch(word)
        if match is None:
            raise ValueError(_EXPECTED)
        if match["setting"] in values:
            raise ValueError(f"{match['setting']} is set twice")
        values[match["setting"]] = match["value"]
    if _SETTING.fullmatch(last):
        raise ValueError("the key is missing; it comes last")
    match = None if _UNKNOWN_SETTING.fullmatch(last) else _KEY.fullmatch(last)
    if match is None:
        raise ValueError(_EXPECTED)
    digest = bytes.fromhex(match["hex"]) if match["hex"] else _digest(match["key"])
    return Key(name=_name(values.pop("name", None), match["name"]), digest=digest, limits=_limits(values))


def _name(setting: str | None, prefix: str | None) -> str | None:
    if setting is not None and prefix is not None:
        raise ValueError("the name is set twice, as name= and as a prefix of the key")
    if setting is not None and not re.fullmatch(_NAME, setting):
        raise ValueError("expected a name of 1 to 64 letters, digits, dots, dashes and underscores")
    return setting or prefix


def _limits(values: dict[str, str]) -> KeyLimits:
    for setting, value in values.items():
        if not _NUMBER.fullmatch(value):
            raise ValueError(f"{setting} must be a whole number of at least 1")
    return KeyLimits(**{setting: int(value) for setting, value in values.items()})


def bearer_token(authorization: str) -> str | None:
    """Return the token of an Authorization header, or None where it has none."""
    scheme, _, token = authorization.partition(" ")
    return token.strip() or None if scheme.lower() == "bearer" else None


def api_token(authorization: str, x_api_key: str) -> str | None:
    """Return the API key of a request, from ``Authorization: Bearer`` or ``x-api-key`` (Anthropic's clients)."""
    return bearer_token(authorization) or x_api_key.strip() or None


class FixedKeys:
    """Keys that were given once and have neither names nor limits."""

    def __init__(self, keys: Sequence[str]) -> None:
        self._keys = tuple(Key(name=None, digest=_digest(key)) for key in keys)

    def find(self, token: str) -> Key | None:
        """Return the entry of this key, in a time that reveals nothing."""
        return _find(self._keys, token)


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()


def _find(keys: Sequence[Key], token: str) -> Key | None:
    digest = _digest(token)
    found = None
    for entry in keys:
        if hmac.compare_digest(entry.digest, digest):
            found = entry
    return found


class KeyFile:
    """The keys of one file. If a changed file cannot be used, the reason is logged and the previous keys stay."""

    def __init__(self, file: Path, now: Callable[[], float], *, no_limits: str | None = None) -> None:
        """Read the file; raise ``KeyFileError`` if it cannot be used.

        ``no_limits`` is the reason why keys with limits are refused; None accepts them.
        """
        self._file, self._no_limits = file, no_limits
        self._watched = WatchedFiles((file,), now)
        self._keys = self._read()

    @property
    def current(self) -> tuple[Key, ...]:
        """The keys as the last ``find`` knew them."""
        return self._keys

    def find(self, token: str) -> Key | None:
        """Return the entry of this key. Every entry is compared, so the time taken reveals nothing."""
        self._refresh()
        return _find(self._keys, token)

    def _refresh(self) -> None:
        if not self._watched.changed():
            return
        try:
            self._keys = self._read()
            _log.info("reloaded %d API keys from %s", len(self._keys), self._file)
        except KeyFileError as error:
            _log.error("API key reload failed, keeping the previous keys: %s", error)

    def _read(self) -> tuple[Key, ...]:
        try:
            keys = parse_keys(self._file.read_text(encoding="utf-8"), str(self._file))
        except (OSError, UnicodeDecodeError) as error:
            reason = error.strerror if isinstance(error, OSError) else "it is not text"
            raise KeyFileError(f"the key file {self._file} cannot be read: {reason}") from error
        if self._no_limits is not None and any(key.limits != UNLIMITED for key in keys):
            raise KeyFileError(f"{self._file}: {self._no_limits}")
        return keys
