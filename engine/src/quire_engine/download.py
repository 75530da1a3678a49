"""The model of the command line: a folder of this machine, or a model that is downloaded first.

``quire-engine org/name`` downloads from a hub as ``vllm serve org/name`` does, with the transfer of ``quire-fetch``.
"""

import asyncio
import sys
import time
from pathlib import Path

from quire_common.model_source import NO_DOWNLOAD, UNPACK, ImageSource, RemoteSource, expected, parse_source
from quire_engine.errors import ModelFolderError
from quire_engine.fetch.__main__ import ProgressLines

_SCHEMES = ("hf:", "s3:", "oci:")


def remote_source(path: Path, revision: str | None) -> RemoteSource | None:
    """Return the source of a model that is not a folder of this machine; None for a path. Raises ModelFolderError."""
    scheme, *rest = path.parts or ("",)
    if scheme in _SCHEMES:
        text = f"{scheme}//{'/'.join(rest)}"
    elif path.is_absolute() or len(path.parts) != 2 or scheme in (".", "..") or path.exists():
        if revision is not None:
            raise ModelFolderError(f"--revision {revision}: {path} is a folder of this machine, which has no revisions")
        return None
    else:
        text = f"hf://{path}"
    source = parse_source(text if revision is None else f"{text}@{revision}")
    if isinstance(source, RemoteSource):
        return source
    if isinstance(source, ImageSource):
        raise ModelFolderError(f"{text} {NO_DOWNLOAD}: {UNPACK}")
    raise ModelFolderError(f"{text} is not a source of models: expected {expected(text)}")


def fetch_model(source: RemoteSource, cache: Path, *, of_adapter: bool = False) -> Path:
    """Return the folder with the whole model or adapter, after downloading what is missing. Raises FetchError."""
    from quire_engine.fetch.model_cache import Manner, fetch, origin_of  # slow to import

    def say(line: str) -> None:
        print(line, file=sys.stderr, flush=True)

    progress = ProgressLines(str(source), say, time.monotonic)
    return asyncio.run(
        fetch(source, origin_of(source, of_adapter=of_adapter), cache, progress=progress, manner=Manner(say=say))
    )
