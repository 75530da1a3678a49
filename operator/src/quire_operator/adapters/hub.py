"""What a Hugging Face hub says of a model: its commit, files and configuration. Calls the hub's own client library.

Blocking, with short answers; the weights themselves are ``hub_download``'s. HF_ENDPOINT, HF_TOKEN, HF_HUB_OFFLINE and a
login are those of the hub's own tools. Every failure is a ModelProblem, or Unreachable where the cache may still do.
"""

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from fnmatch import fnmatch
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

from quire_operator import __version__
from quire_operator.errors import ModelProblem

_WANTED = ("*.json", "*.safetensors", "tokenizer.model", "vocab.txt", "merges.txt", "*.jinja")
"""What an engine reads: never pickles, never code."""
_SKIPPED = ("*/*", "consolidated*.safetensors")
"""Folders hold other formats of the same weights."""
_TIMEOUT_SECONDS = 20.0
_TRANSPORT_ERROR: type[BaseException] = HfHubHTTPError.__bases__[0]
"""The root of the errors of the HTTP library under the hub's client, which changed from one version to the next."""


class Unreachable(ModelProblem):
    """Nobody answers at the hub's address, or it may not be asked."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HubFile:
    name: str
    size_bytes: int
    sha256: str | None
    """Of large files; small ones have none."""
    url: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Listing:
    """A revision of a repository, as of one commit."""

    repository: str
    commit: str
    files: tuple[HubFile, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class HubModel:
    """What can be known of a model without its weights."""

    config: Mapping[str, object]
    parameters: int


def list_files(repository: str, revision: str) -> Listing:
    """The files an engine needs, at the commit the revision now names."""
    with explained(repository, revision):
        info = _api().model_info(repository, revision=revision, files_metadata=True, timeout=_TIMEOUT_SECONDS)
    commit = info.sha or revision
    files = tuple(
        HubFile(
            name=sibling.rfilename,
            size_bytes=sibling.size or 0,
            sha256=sibling.lfs.sha256 if sibling.lfs else None,
            url=hf_hub_url(repository, sibling.rfilename, revision=commit, endpoint=_endpoint()),
        )
        for sibling in info.siblings or ()
        if _is_wanted(sibling.rfilename)
    )
    if not any(file.name.endswith(".safetensors") for file in files):
        raise ModelProblem(
            f"{repository} at {revision} has no safetensors weights",
            hint="quire reads only safetensors; convert the model or choose another repository",
        )
    return Listing(repository=repository, commit=commit, files=files)


def describe(repository: str, revision: str) -> HubModel:
    """Configuration and number of parameters, for some kilobytes."""
    commit = list_files(repository, revision).commit
    url = hf_hub_url(repository, "config.json", revision=commit, endpoint=_endpoint())
    with explained(repository, revision):
        counts = _api().get_safetensors_metadata(repository, revision=commit).parameter_count
        answer = httpx.get(url, headers=request_headers(), timeout=_TIMEOUT_SECONDS, follow_redirects=True)
        answer.raise_for_status()
        config = answer.json()
    return HubModel(config=config if isinstance(config, dict) else {}, parameters=sum(counts.values()))


def in_the_hubs_own_cache(listing: Listing) -> Path | None:
    """The folder where the hub's own tools have put all of these files already."""
    folders: set[Path] = set()
    for file in listing.files:
        found = try_to_load_from_cache(listing.repository, file.name, revision=listing.commit)
        if not isinstance(found, str) or Path(found).stat().st_size != file.size_bytes:
            return None
        folders.add(Path(found).parent)
    return folders.pop() if len(folders) == 1 else None


def request_headers() -> dict[str, str]:
    """Who asks, and with which token."""
    token = get_token()
    return {"User-Agent": f"quire/{__version__}"} | ({"Authorization": f"Bearer {token}"} if token else {})


def _api() -> HfApi:
    return HfApi(endpoint=_endpoint(), library_name="quire")


def _endpoint() -> str | None:
    """Read each time: the library reads it once, when it is imported."""
    return os.environ.get("HF_ENDPOINT") or None


def _is_wanted(name: str) -> bool:
    return any(fnmatch(name, pattern) for pattern in _WANTED) and not any(fnmatch(name, p) for p in _SKIPPED)


@contextmanager
def explained(repository: str, revision: str) -> Iterator[None]:
    """What the hub's client raises, in words for a person. The order is from the special to the general."""
    hub = _endpoint() or "huggingface.co"
    try:
        yield
    except GatedRepoError as error:
        raise gated(repository) from error
    except RepositoryNotFoundError as error:
        raise ModelProblem(
            f"{hub} has no model {repository}, or it is private",
            hint="check the spelling of org/name; for a private model set HF_TOKEN",
        ) from error
    except RevisionNotFoundError as error:
        raise ModelProblem(
            f"{repository} has no revision {revision}", hint="name a branch, tag or commit after the @"
        ) from error
    except (EntryNotFoundError, NotASafetensorsRepoError, SafetensorsParsingError) as error:
        raise ModelProblem(
            f"{repository} at {revision} is no model quire can serve: {first_line(error)}",
            hint="it needs config.json and safetensors weights",
        ) from error
    except (HfHubHTTPError, httpx.HTTPStatusError, ValueError) as error:
        raise ModelProblem(f"{hub} refused {repository}: {first_line(error)}") from error
    except (_TRANSPORT_ERROR, httpx.TransportError, ConnectionError, TimeoutError) as error:
        raise unreachable(repository, error) from error


def gated(repository: str) -> ModelProblem:
    return ModelProblem(
        f"{repository} is gated: the hub wants to know who you are",
        hint=f"ask for access at https://huggingface.co/{repository}, then set HF_TOKEN",
    )


def unreachable(repository: str, error: BaseException) -> Unreachable:
    return Unreachable(
        f"{_endpoint() or 'huggingface.co'} can't be reached for {repository}: {first_line(error)}",
        hint="check the network and HF_ENDPOINT, then run again; what was downloaded is kept and continued",
    )


def first_line(error: BaseException) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0][:300]
