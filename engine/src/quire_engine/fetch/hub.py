"""hf:// as an ``Origin``: the commit, files and configuration of a model on a Hugging Face hub.

The hub's own client library lists the files. It would restart a file in each process, so ``transfer`` downloads them.
HF_ENDPOINT, HF_TOKEN, HF_HUB_OFFLINE and a login have the same meaning as for the hub's own tools. Every failure is a
FetchError, or Unreachable if a cached version may be used instead.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import httpx
from huggingface_hub import HfApi, get_token, hf_hub_url, try_to_load_from_cache
from huggingface_hub.errors import (
    EntryNotFoundError,
    GatedRepoError,
    HfHubHTTPError,
    NotASafetensorsRepoError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
    SafetensorsParsingError,
)
from huggingface_hub.hf_api import RepoSibling

from quire_common.model_source import HubSource
from quire_engine import __version__
from quire_engine.errors import FetchError
from quire_engine.fetch.remote_files import (
    Algorithm,
    Answer,
    Checksum,
    FileRequest,
    Listing,
    ModelDescription,
    PlainFiles,
    RemoteFile,
    Unreachable,
    check_weights,
    first_line,
    is_wanted,
)
from quire_engine.model_folder import INDEX, WHOLE_FILE

_TIMEOUT_SECONDS = 20.0
_TRANSPORT_ERROR: type[BaseException] = HfHubHTTPError.__bases__[0]
"""The root of the errors of the HTTP library below the hub's client, which differs between versions."""


class HubOrigin(PlainFiles):
    """A repository at a revision."""

    def __init__(self, source: HubSource) -> None:
        self._source = source

    def listing(self) -> Listing:
        """Return the files that an engine needs, at the current commit of the revision."""
        repository, revision = self._source.repository, self._source.revision
        with explained(repository, revision):
            info = _api().model_info(repository, revision=revision, files_metadata=True, timeout=_TIMEOUT_SECONDS)
        commit = info.sha or revision
        files = tuple(
            RemoteFile(
                name=sibling.rfilename,
                size_bytes=sibling.size or 0,
                checksum=_checksum(sibling),
                address=hf_hub_url(repository, sibling.rfilename, revision=commit, endpoint=_endpoint()),
            )
            for sibling in info.siblings or ()
            if is_wanted(sibling.rfilename)
        )
        check_weights(f"{repository} at {revision}", [file.name for file in files])
        return Listing(model=repository, version=commit, files=files)

    def describe(self) -> ModelDescription:
        repository, revision = self._source.repository, self._source.revision
        listing = self.listing()
        commit, names = listing.version, [file.name for file in listing.files]
        url = hf_hub_url(repository, "config.json", revision=commit, endpoint=_endpoint())
        with explained(repository, revision):
            if WHOLE_FILE in names or INDEX in names:
                counts = [_api().get_safetensors_metadata(repository, revision=commit).parameter_count]
            else:
                weights = [name for name in names if name.endswith(".safetensors")]
                read = partial(_api().parse_safetensors_file_metadata, repository, revision=commit)
                counts = [read(filename=name).parameter_count for name in weights]
            answer = httpx.get(url, headers=request_headers(), timeout=_TIMEOUT_SECONDS, follow_redirects=True)
            answer.raise_for_status()
            config = answer.json()
        return ModelDescription(config=config, parameters=sum(sum(count.values()) for count in counts))

    def elsewhere(self, listing: Listing) -> Path | None:
        """Return the folder in which the hub's own tools have stored all of these files, or None."""
        folders: set[Path] = set()
        for file in listing.files:
            found = try_to_load_from_cache(listing.model, file.name, revision=listing.version)
            if not isinstance(found, str) or Path(found).stat().st_size != file.size_bytes:
                return None
            folders.add(Path(found).parent)
        return folders.pop() if len(folders) == 1 else None

    def request(self, file: RemoteFile) -> FileRequest:
        return FileRequest(url=file.address, headers=request_headers())

    def refusal(self, file: RemoteFile, answer: Answer) -> FetchError | None:
        if answer.status in (401, 403):
            return gated(self._source.repository)
        return FetchError(f"{file.address} answered {answer.status}")

    def unreachable(self, error: BaseException) -> Unreachable:
        return unreachable(self._source.repository, error)


def request_headers() -> dict[str, str]:
    """Return the headers that identify this client and its token."""
    token = get_token()
    return {"User-Agent": f"quire/{__version__}"} | ({"Authorization": f"Bearer {token}"} if token else {})


def _api() -> HfApi:
    return HfApi(endpoint=_endpoint(), library_name="quire")


def _endpoint() -> str | None:
    """Return HF_ENDPOINT. The hub's library reads it only once, when it is imported."""
    return os.environ.get("HF_ENDPOINT") or None


def _checksum(sibling: RepoSibling) -> Checksum | None:
    if sibling.lfs is not None:
        return Checksum(algorithm=Algorithm.SHA256, hex=sibling.lfs.sha256)
    return Checksum(algorithm=Algorithm.GIT, hex=sibling.blob_id) if sibling.blob_id else None


@contextmanager
def explained(repository: str, revision: str) -> Iterator[None]:
    """Raise the exceptions of the hub's client as FetchError. The order is from special to general."""
    hub = _endpoint() or "huggingface.co"
    try:
        yield
    except GatedRepoError as error:
        raise gated(repository) from error
    except RepositoryNotFoundError as error:
        raise FetchError(
            f"{hub} has no model {repository}, or it is private",
            hint="check the spelling of org/name; for a private model set HF_TOKEN",
        ) from error
    except RevisionNotFoundError as error:
        raise FetchError(
            f"{repository} has no revision {revision}", hint="name a branch, tag or commit after the @"
        ) from error
    except (EntryNotFoundError, NotASafetensorsRepoError, SafetensorsParsingError) as error:
        raise FetchError(
            f"{repository} at {revision} is not a model that quire can serve: {first_line(error)}",
            hint="it needs config.json and safetensors weights",
        ) from error
    except (HfHubHTTPError, httpx.HTTPStatusError, ValueError) as error:
        raise FetchError(f"{hub} refused {repository}: {first_line(error)}") from error
    except (_TRANSPORT_ERROR, httpx.TransportError, ConnectionError, TimeoutError) as error:
        raise unreachable(repository, error) from error


def gated(repository: str) -> FetchError:
    return FetchError(
        f"{repository} is gated: the hub requires the token of an account with access",
        hint=f"request access at https://huggingface.co/{repository}, then set HF_TOKEN",
    )


def unreachable(repository: str, error: BaseException) -> Unreachable:
    return Unreachable(
        f"{_endpoint() or 'huggingface.co'} cannot be reached for {repository}: {first_line(error)}",
        hint="check the network and HF_ENDPOINT, then run again; what was downloaded is kept and continued",
    )
