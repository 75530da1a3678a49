"""Discovery from a JSON file that somebody replaces atomically: local mode, where ``quire up`` writes it.

    {"models": [{"name": "chat", "endpoints": [{"id": "chat-0", "url": "http://127.0.0.1:40001",
                                                "ready": true, "serving": true, "terminating": false}]}]}

Polled by its modification time, inode and size. A file that can't be read leaves the last snapshot standing.
"""

import asyncio
import logging
import os
from pathlib import Path
from urllib.parse import urlsplit

import msgspec

from quire_gateway.endpoints import Endpoint, Publish, Snapshot

POLL_SECONDS = 0.1

_log = logging.getLogger(__name__)


class _Endpoint(msgspec.Struct, frozen=True):
    id: str
    url: str
    ready: bool = True
    serving: bool = True
    terminating: bool = False


class _Model(msgspec.Struct, frozen=True):
    name: str
    endpoints: list[_Endpoint]


class _File(msgspec.Struct, frozen=True):
    models: list[_Model]


class Unreadable(ValueError):
    """The text is no list of endpoints; says what is wrong with it."""


def parse_endpoints(text: bytes) -> Snapshot:
    """The file's content as a snapshot; raises ``Unreadable``."""
    try:
        file = msgspec.json.decode(text, type=_File)
    except msgspec.DecodeError as error:
        raise Unreadable(str(error)) from error
    snapshot: dict[str, tuple[Endpoint, ...]] = {}
    for model in file.models:
        if model.name in snapshot:
            raise Unreadable(f"model {model.name!r} is there twice")
        endpoints = {endpoint.id: _endpoint(endpoint, model.name) for endpoint in model.endpoints}
        if len(endpoints) != len(model.endpoints):
            twice = next(e.id for n, e in enumerate(model.endpoints) if e.id in {x.id for x in model.endpoints[:n]})
            raise Unreadable(f"model {model.name!r}: endpoint {twice!r} is there twice")
        snapshot[model.name] = tuple(endpoints.values())
    return snapshot


def _endpoint(endpoint: _Endpoint, model: str) -> Endpoint:
    if not _is_address(endpoint.url):
        raise Unreadable(
            f"model {model!r}, endpoint {endpoint.id!r}: url must be http://HOST:PORT, got {endpoint.url!r}"
        )
    return Endpoint(
        id=endpoint.id,
        url=endpoint.url.rstrip("/"),
        ready=endpoint.ready,
        serving=endpoint.serving,
        terminating=endpoint.terminating,
    )


def _is_address(text: str) -> bool:
    try:
        url = urlsplit(text)
        return (
            url.scheme in ("http", "https")
            and bool(url.hostname and url.port)
            and not (url.path.strip("/") or url.query)
        )
    except ValueError:
        # A port that is no number.
        return False


class FileDiscovery:
    """Watches one file."""

    def __init__(self, path: Path) -> None:
        self._path = path

    async def run(self, publish: Publish) -> None:
        """See ``Discovery``."""
        seen: tuple[int, int, int] | None = None
        missing = False
        while True:
            try:
                stat = os.stat(self._path)
                mark = (stat.st_mtime_ns, stat.st_ino, stat.st_size)
                if mark != seen:
                    seen = mark
                    publish(parse_endpoints(self._path.read_bytes()))
                missing = False
            except Unreadable as error:
                _log.error("%s can't be read, the endpoints known before stay: %s", self._path, error)
            except OSError as error:
                if not missing:
                    _log.warning("%s can't be read, the endpoints known before stay: %s", self._path, error.strerror)
                missing, seen = True, None
            await asyncio.sleep(POLL_SECONDS)
