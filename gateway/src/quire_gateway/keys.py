"""Who may come in: API keys from a file, one a line, read again when they change. Compared as SHA-256.

Under ``app``, which asks before anything else is done. The file is of the same form as the engine's ``--api-key-file``,
so that one Secret may serve both; what it says of limits is the engines' to enforce, for they count tokens.
"""

import hashlib
import hmac
import logging
import re
from collections.abc import Callable
from pathlib import Path

from quire_gateway.errors import ConfigProblem, Unauthorized
from quire_gateway.watched_files import WatchedFiles

_log = logging.getLogger(__name__)

_NAME = r"[A-Za-z0-9._-]{1,64}"
_KEY = re.compile(rf"(?:(?!sha256:){_NAME}:)?(?:sha256:(?P<hex>[0-9a-fA-F]{{64}})|(?P<key>(?!sha256:)[!-~]{{8,512}}))")
_NO_KEY = re.compile(r"[a-z_]+=[^=].*")
"""A setting, or what was meant for one: a key may have a = in it, but nobody's begins like this."""
_SETTING = re.compile(rf"name={_NAME}|(requests_per_minute|tokens_per_minute|max_concurrent)=[1-9][0-9]{{0,11}}")


def parse_keys(text: str, origin: str) -> tuple[bytes, ...]:
    """The keys' digests. Raises ``ConfigProblem`` that names lines, never what they hold."""
    lines = [(number, line.split()) for number, line in enumerate(text.splitlines(), start=1)]
    said = [(number, words) for number, words in lines if words and not words[0].startswith("#")]
    digests = [(number, _digest(words)) for number, words in said]
    wrong = [number for number, digest in digests if digest is None]
    if wrong:
        raise ConfigProblem(
            [
                f"{origin}, line {number}: needed is KEY, NAME:KEY or NAME:sha256:HEX, with a key of 8 to 512 "
                "printable characters; before it may stand name=, requests_per_minute=, tokens_per_minute= and "
                "max_concurrent="
                for number in wrong
            ]
        )
    if not digests:
        raise ConfigProblem([f"{origin} holds no key"])
    return tuple(digest for _, digest in digests if digest is not None)


def _digest(words: list[str]) -> bytes | None:
    """None where the line is none of a key."""
    *settings, key = words
    match = _KEY.fullmatch(key)
    if match is None or _NO_KEY.fullmatch(key) or not all(map(_SETTING.fullmatch, settings)):
        return None
    return bytes.fromhex(match["hex"]) if match["hex"] else hashlib.sha256(match["key"].encode()).digest()


class KeyFile:
    """The keys of one file. A change that can't be used is logged, and the keys before it stay."""

    def __init__(self, file: Path, now: Callable[[], float]) -> None:
        """Raises ``ConfigProblem`` if the file can't be used."""
        self._file = file
        self._watched = WatchedFiles((file,), now)
        self._digests = self._read()

    def check(self, authorization: str) -> None:
        """Raises ``Unauthorized`` where the header brings no key of the file."""
        self._refresh()
        scheme, _, token = authorization.partition(" ")
        token = token.strip()
        if scheme.lower() != "bearer" or not token:
            raise Unauthorized("send your API key in the header: Authorization: Bearer KEY", code="missing_api_key")
        digest = hashlib.sha256(token.encode("utf-8", "surrogateescape")).digest()
        # Every entry is compared, so that time tells nothing.
        if not sum(hmac.compare_digest(entry, digest) for entry in self._digests):
            raise Unauthorized("this API key is not known here", code="invalid_api_key")

    def _refresh(self) -> None:
        if not self._watched.changed():
            return
        try:
            self._digests = self._read()
            _log.info("read %d keys again from %s", len(self._digests), self._file)
        except ConfigProblem as problem:
            _log.error("the keys stay as they were: %s", problem)

    def _read(self) -> tuple[bytes, ...]:
        try:
            text = self._file.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            reason = error.strerror if isinstance(error, OSError) else "it is not text"
            raise ConfigProblem([f"--api-key-file {self._file} cannot be read: {reason}"]) from error
        return parse_keys(text, str(self._file))
