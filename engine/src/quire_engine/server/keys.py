"""Who may come in: keys from files, one a line, read again when they change. Compared as SHA-256 in constant time.

A line is KEY, NAME:KEY or NAME:sha256:HEX; empty lines and those that begin with # say nothing. NAME is the tenant.
"""

import hashlib
import hmac
import logging
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from quire_engine.errors import KeyFileError

_log = logging.getLogger(__name__)

_CHECK_SECONDS = 1.0
_LINE = re.compile(
    r"(?:(?!sha256:)(?P<name>[A-Za-z0-9._-]{1,64}):)?(?:sha256:(?P<hex>[0-9a-fA-F]{64})|(?P<key>[!-~]{8,512}))"
)


@dataclass(frozen=True, slots=True)
class Key:
    name: str | None
    digest: bytes


def parse_keys(text: str, origin: str) -> tuple[Key, ...]:
    """Raises KeyFileError that names lines, never what they hold."""
    keys = []
    for number, line in enumerate(text.splitlines(), start=1):
        line = line.strip()
        if not line or line.startswith("#"):
            continue
        match = _LINE.fullmatch(line)
        if match is None:
            raise KeyFileError(
                f"{origin}, line {number}: needed is KEY, NAME:KEY or NAME:sha256:HEX, "
                "with a key of 8 to 512 printable characters"
            )
        digest = bytes.fromhex(match["hex"]) if match["hex"] else hashlib.sha256(match["key"].encode()).digest()
        keys.append(Key(match["name"], digest))
    if not keys:
        raise KeyFileError(f"{origin} holds no key")
    return tuple(keys)


class KeyFile:
    """The keys of one file. A change that cannot be used is logged, and the keys before it stay."""

    def __init__(self, file: Path, now: Callable[[], float]) -> None:
        self._file = file
        self._now = now
        self._seen, self._keys = self._read()
        self._checked = now()

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
        if self._now() - self._checked < _CHECK_SECONDS:
            return
        self._checked = self._now()
        try:
            if self._stamp() != self._seen:
                self._seen, self._keys = self._read()
                _log.info("read %d keys again from %s", len(self._keys), self._file)
        except (OSError, KeyFileError) as error:
            _log.error("the keys stay as they were: %s", error)

    def _read(self) -> tuple[tuple[int, int, int], tuple[Key, ...]]:
        try:
            stamp = self._stamp()
            return stamp, parse_keys(self._file.read_text(encoding="utf-8"), str(self._file))
        except (OSError, UnicodeDecodeError) as error:
            raise KeyFileError(f"the key file {self._file} cannot be read: {error}") from error

    def _stamp(self) -> tuple[int, int, int]:
        status = self._file.stat()
        return status.st_mtime_ns, status.st_ino, status.st_size
