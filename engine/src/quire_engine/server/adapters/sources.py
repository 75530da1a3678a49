"""Where an adapter's files are: a folder of this machine, or a source from which they are downloaded first."""

import asyncio
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from quire_common.contract.adapters_file import AdapterEntry, AdapterFailure
from quire_common.model_source import (
    ClaimSource,
    FileSource,
    HubSource,
    ImageSource,
    RemoteSource,
    cache_home,
    expected,
    parse_source,
)
from quire_engine.download import fetch_model, remote_source
from quire_engine.errors import AdapterError, FetchError, Forbidden, InvalidRequest, ModelFolderError
from quire_engine.fetch.version_lock import hold


@dataclass(frozen=True, slots=True, kw_only=True)
class Files:
    """The files of an adapter on this machine."""

    folder: Path
    revision: str | None = None
    """The version that was downloaded, if the source has versions."""


def source_of(entry: AdapterEntry) -> RemoteSource | Path:
    """Return the folder of an entry, or where it is downloaded from. Raise AdapterError."""
    text = entry.source
    if "://" not in text:
        try:
            return remote_source(Path(text), entry.revision) or Path(text)
        except ModelFolderError as error:
            raise _failed(str(error)) from error
    source = parse_source(text)
    if isinstance(source, HubSource) and entry.revision is not None:
        source = parse_source(f"hf://{source.repository}@{entry.revision}")
    elif entry.revision is not None:
        raise _failed(f"{text} has no revisions, so that revision {entry.revision!r} cannot be chosen")
    match source:
        case None:
            raise _failed(f"source {text!r} is not a source: expected {expected(text)}")
        case FileSource(path=path):
            return Path(path)
        case ClaimSource() | ImageSource():
            raise _failed(f"{text}: an engine cannot mount a claim or an image; use a folder, a hub or a bucket")
        case remote:
            return remote


async def fetch_files(entry: AdapterEntry, cache: Path | None) -> Files:
    """Return the files of an adapter, after a download if they are elsewhere. Raise AdapterError."""
    source = source_of(entry)
    if isinstance(source, Path):
        if not source.is_dir():
            raise _failed(f"{source} is not a folder")
        return Files(folder=source)
    try:
        folder = await asyncio.to_thread(_download, source, cache or cache_home(os.environ))
    except FetchError as error:
        raise _failed(" ".join(filter(None, (str(error), error.hint)))) from error
    return Files(folder=folder, revision=folder.name)


def _download(source: RemoteSource, cache: Path) -> Path:
    folder = fetch_model(source, cache, of_adapter=True)
    hold(folder)  # no other process removes the version to make room
    return folder


def allowed_folder(path: str, roots: Sequence[Path]) -> Path:
    """Return a folder that a request may load.

    Raise Forbidden outside of the roots, InvalidRequest if it does not exist.
    """
    if not roots:
        raise Forbidden(
            "adapters cannot be loaded by requests: start the server with --adapter-roots, the folders that they may"
            " read",
            code="adapter_loading_disabled",
        )
    folder = Path(os.path.realpath(path))
    if not any(folder.is_relative_to(os.path.realpath(root)) for root in roots):
        raise Forbidden(
            "lora_path: the folder is not below one of --adapter-roots",
            param="lora_path",
            code="adapter_path_forbidden",
        )
    if not folder.is_dir():
        raise InvalidRequest(f"lora_path: {path[:200]!r} is not a folder", param="lora_path")
    return folder


def _failed(message: str) -> AdapterError:
    return AdapterError(AdapterFailure.DOWNLOAD_FAILED, message)
