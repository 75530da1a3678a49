"""Who may come in: keys from files, one a line, read again when they change. Compared as SHA-256 in constant time.

A line is a key, KEY or sha256:HEX, after whatever is to be said of it, in words apart by blanks::

    name=team-a requests_per_minute=600 tokens_per_minute=200000 max_concurrent=32 sha256:HEX

The name is the tenant; NAME:KEY is short for name=NAME KEY. Keys of one name share one allowance, so their lines say
the same. Empty lines and those that begin with # say nothing.
"""

import hashlib
import hmac
import logging
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from quire_engine.errors import KeyFileError
from quire_engine.server.auth.rate_limits import UNLIMITED, Limits
from quire_engine.server.auth.watched_files import WatchedFiles

_log = logging.getLogger(__name__)

_NAME = r"[A-Za-z0-9._-]{1,64}"
_KEY = re.compile(
    rf"(?:(?!sha256:)(?P<name>{_NAME}):)?(?:sha256:(?P<hex>[0-9a-fA-F]{{64}})|(?P<key>(?!sha256:)[!-~]{{8,512}}))"
)
_SETTING = re.compile(r"(?P<what>name|requests_per_minute|tokens_per_minute|max_concurrent)=(?P<value>.*)")
_NO_KEY = re.compile(r"[a-z_]+=[^=].*")
"""A setting with a name that is none: a key may have a = in it, but nobody's begins like this."""
_NUMBER = re.compile(r"[1-9][0-9]{0,11}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Key:
    name: str | None
    digest: bytes
    limits: Limits = UNLIMITED

    @property
    def tenant(self) -> str:
        """Without a name, the beginning of its hash: enough to tell keys apart, of no use to whoever reads a log."""
        return self.name or f"key-{self.digest.hex()[:8]}"


def parse_keys(text: str, origin: str) -> tuple[Key, ...]:
    """Raises KeyFileError that names lines, never what they hold."""
    keys: list[Key] = []
    first_of: dict[str, tuple[int, Limits]] = {}
    for number, line in enumerate(text.splitlines(), start=1):
        line = line.strip()
        if not line or line.startswith("#"):
            continue
        key = _parse_line(line, f"{origin}, line {number}")
        first, limits = first_of.setdefault(key.tenant, (number, key.limits))
        if limits != key.limits:
            raise KeyFileError(
                f"{origin}, lines {first} and {number}: keys of one name share their limits, so both must say the same"
            )
        keys.append(key)
    if not keys:
        raise KeyFileError(f"{origin} holds no key")
    return tuple(keys)


def _parse_line(line: str, where: str) -> Key:
    *words, last = line.split()
    settings: dict[str, str] = {}
    for word in words:
        match = _SETTING.fullmatch(word)
        if match is None:
            raise KeyFileError(
                f"{where}: needed is KEY or sha256:HEX, a key being 8 to 512 printable characters without blanks; "
                "before it may stand NAME: or name=, requests_per_minute=, tokens_per_minute= and max_concurrent="
            )
        if match["what"] in settings:
            raise KeyFileError(f"{where}: {match['what']} is said twice")
        settings[match["what"]] = match["value"]
    if _SETTING.fullmatch(last):
        raise KeyFileError(f"{where}: the key itself is missing; it comes last")
    if _NO_KEY.fullmatch(last):
        raise KeyFileError(
            f"{where}: what may stand before a key is name=, requests_per_minute=, tokens_per_minute= and "
            "max_concurrent=; the key itself comes last, after a blank"
        )
    match = _KEY.fullmatch(last)
    if match is None:
        raise KeyFileError(
            f"{where}: needed is KEY, NAME:KEY or NAME:sha256:HEX, with a key of 8 to 512 printable characters"
        )
    digest = bytes.fromhex(match["hex"]) if match["hex"] else hashlib.sha256(match["key"].encode()).digest()
    return Key(
        name=_name(settings.pop("name", None), match["name"], where), digest=digest, limits=_limits(settings, where)
    )


def _name(said: str | None, short: str | None, where: str) -> str | None:
    if said is None or short is None:
        if said is not None and not re.fullmatch(_NAME, said):
            raise KeyFileError(f"{where}: a name is 1 to 64 letters, digits, dots, dashes and underscores")
        return said or short
    raise KeyFileError(f"{where}: the name is said twice, as name= and before the key")


def _limits(settings: dict[str, str], where: str) -> Limits:
    for what, value in settings.items():
        if not _NUMBER.fullmatch(value):
            raise KeyFileError(f"{where}: {what} must be a whole number of at least 1")
    return Limits(**{what: int(value) for what, value in settings.items()})


class KeyFile:
    """The keys of one file. A change that cannot be used is logged, and the keys before it stay."""

    def __init__(self, file: Path, now: Callable[[], float], *, limits: bool = True) -> None:
        self._file = file
        self._limits = limits
        self._watched = WatchedFiles((file,), now)
        self._keys = self._read()

    def find(self, key: str) -> Key | None:
        """The entry of this key. Every entry is compared, so that time tells nothing."""
        self._refresh()
        digest = hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()
        found = None
        for entry in self._keys:
            if hmac.compare_digest(entry.digest, digest):
                found = entry
        return found

    def _refresh(self) -> None:
        if not self._watched.changed():
            return
        try:
            self._keys = self._read()
            _log.info("read %d keys again from %s", len(self._keys), self._file)
        except KeyFileError as error:
            _log.error("the keys stay as they were: %s", error)

    def _read(self) -> tuple[Key, ...]:
        try:
            keys = parse_keys(self._file.read_text(encoding="utf-8"), str(self._file))
        except (OSError, UnicodeDecodeError) as error:
            raise KeyFileError(f"the key file {self._file} cannot be read: {error}") from error
        if not self._limits and any(key.limits != UNLIMITED for key in keys):
            raise KeyFileError(f"{self._file}: limits are for the keys of --api-key-file")
        return keys
