"""Discovery from a JSON file that is replaced atomically: local mode, where ``quire up`` writes it.

The format is in ``quire_common.contract.gateway``. The file is polled by its modification time, inode and size. If it
cannot be read, the last snapshot stays valid.
"""

import asyncio
import logging
import os
from collections import Counter
from dataclasses import replace
from pathlib import Path
from urllib.parse import urlsplit

import msgspec

from quire_common.contract.gateway import Endpoint, EndpointsFile
from quire_gateway.endpoints import Publish, Snapshot

POLL_SECONDS = 0.1

_log = logging.getLogger(__name__)


class InvalidEndpoints(ValueError):
    """Text that is no list of endpoints; the message says why."""


def parse_endpoints(text: bytes) -> Snapshot:
    """Return the file's content as a snapshot, or raise ``InvalidEndpoints``."""
    try:
        file = msgspec.json.decode(text, type=EndpointsFile)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise InvalidEndpoints(str(error)) from error
    _check_unique("model", [model.name for model in file.models])
    for model in file.models:
        _check_unique(f"model {model.name!r}: endpoint", [endpoint.id for endpoint in model.endpoints])
    models = {model.name for model in file.models if model.adapter_of is None}
    for model in file.models:
        if model.adapter_of is not None and model.adapter_of not in models:
            raise InvalidEndpoints(f"model {model.name!r}: adapter_of {model.adapter_of!r} names no model of the file")
    return {
        model.name: replace(model, endpoints=tuple(_endpoint(each, model.name) for each in model.endpoints))
        for model in file.models
    }


def _check_unique(kind: str, names: list[str]) -> None:
    for name, count in Counter(names).items():
        if count > 1:
            raise InvalidEndpoints(f"{kind} {name!r} is listed twice")


def _endpoint(endpoint: Endpoint, model: str) -> Endpoint:
    if not _is_address(endpoint.url):
        raise InvalidEndpoints(
            f"model {model!r}, endpoint {endpoint.id!r}: expected a url http://HOST:PORT, got {endpoint.url!r}"
        )
    return replace(endpoint, url=endpoint.url.rstrip("/"))


def _is_address(text: str) -> bool:
    try:
        url = urlsplit(text)
        has_host_and_port = bool(url.hostname and url.port)
    except ValueError:
        # The port is not a number.
        return False
    return url.scheme in ("http", "https") and has_host_and_port and not (url.path.strip("/") or url.query)


class FileDiscovery:
    """Discovery from one file."""

    num_gateways = 1

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
            except InvalidEndpoints as error:
                _log.error("endpoints file %s is invalid, keeping the previous endpoints: %s", self._path, error)
            except OSError as error:
                if not missing:
                    _log.warning(
                        "endpoints file %s cannot be read, keeping the previous endpoints: %s",
                        self._path,
                        error.strerror,
                    )
                missing, seen = True, None
            await asyncio.sleep(POLL_SECONDS)
