"""A model on a Hugging Face hub: what it is, and its files in quire's cache. Calls the hub's own client library.

``describe`` reads a few kilobytes. ``python -m quire_operator.adapters.hub REPOSITORY REVISION CACHE`` downloads: a
process of its own, so that Ctrl-C can stop it at once; it writes progress and outcome as JSON lines. What an
interrupted download left is continued by the next one. HF_ENDPOINT and HF_TOKEN are those of the hub's own tools.
"""

import json
import os
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from huggingface_hub import HfApi, snapshot_download
from huggingface_hub.errors import (
    EntryNotFoundError,
    GatedRepoError,
    HfHubHTTPError,
    LocalEntryNotFoundError,
    NotASafetensorsRepoError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
    SafetensorsParsingError,
)
from huggingface_hub.utils.tqdm import disable_progress_bars

from quire_operator.domain.quantities import format_bytes
from quire_operator.errors import ModelProblem

FILES = ("*.json", "*.safetensors", "tokenizer.model", "vocab.txt", "merges.txt", "*.jinja")
"""What an engine reads: never pickles, never code."""
SKIPPED = ("original/*", "onnx/*", "openvino/*", "consolidated*.safetensors")
_REPORT_SECONDS = 0.5
_TRANSPORT_ERROR: type[BaseException] = HfHubHTTPError.__bases__[0]
"""The root of the errors of the HTTP library under the hub's client, which changed from one version to the next."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HubModel:
    """What the hub says of a model without its weights being here."""

    config: Mapping[str, object]
    parameters: int


def describe(repository: str, revision: str, cache: Path) -> HubModel:
    """Configuration and number of parameters; raises ModelProblem."""
    disable_progress_bars()
    api = _api()
    with _explained(repository, revision):
        path = api.hf_hub_download(repository, "config.json", revision=revision, cache_dir=cache)
        counts = api.get_safetensors_metadata(repository, revision=revision).parameter_count
    config = json.loads(Path(path).read_text(encoding="utf-8"))
    return HubModel(config=config if isinstance(config, dict) else {}, parameters=sum(counts.values()))


def cached(repository: str, revision: str, cache: Path) -> Path | None:
    """The folder with all of the model's files if they are here already; asks nobody."""
    try:
        path = snapshot_download(
            repository,
            revision=revision,
            cache_dir=cache,
            allow_patterns=list(FILES),
            ignore_patterns=list(SKIPPED),
            local_files_only=True,
        )
    except LocalEntryNotFoundError:
        return None
    return Path(path) if any(Path(path).glob("*.safetensors")) else None


def download(repository: str, revision: str, cache: Path, *, progress: Callable[[int, int], None]) -> Path:
    """The folder with the model's files, downloaded as far as they are not here; raises ModelProblem.

    ``progress(done_bytes, total_bytes)`` is called from another thread. A hub that can't be reached is no problem
    where everything is here already.
    """
    disable_progress_bars()
    with _explained(repository, revision):
        total, missing = _sizes(repository, revision, cache)
        _check_disk(repository, cache, missing)
        with _reported(_Blobs(repository, cache), total=total, missing=missing, progress=progress):
            path = snapshot_download(
                repository,
                revision=revision,
                cache_dir=cache,
                endpoint=_endpoint(),
                allow_patterns=list(FILES),
                ignore_patterns=list(SKIPPED),
            )
    return Path(path)


def _api() -> HfApi:
    return HfApi(endpoint=_endpoint())


def _endpoint() -> str | None:
    return os.environ.get("HF_ENDPOINT") or None


def _sizes(repository: str, revision: str, cache: Path) -> tuple[int, int]:
    """Bytes of all files, and of those that are not here yet. Nothing where the hub is away: the cache may do."""
    try:
        files = snapshot_download(
            repository,
            revision=revision,
            cache_dir=cache,
            endpoint=_endpoint(),
            allow_patterns=list(FILES),
            ignore_patterns=list(SKIPPED),
            dry_run=True,
        )
    except (RepositoryNotFoundError, RevisionNotFoundError):
        raise
    except OSError:
        return 0, 0
    if not any(file.filename.endswith(".safetensors") for file in files):
        raise ModelProblem(
            f"{repository} at {revision} has no safetensors weights",
            hint="quire reads only safetensors; convert the model or choose another repository",
        )
    sizes = [(file.file_size or 0, file.will_download) for file in files]
    return sum(size for size, _ in sizes), sum(size for size, missing in sizes if missing)


def _check_disk(repository: str, cache: Path, missing: int) -> None:
    cache.mkdir(parents=True, exist_ok=True)
    status = os.statvfs(cache)
    free = status.f_bavail * status.f_frsize
    if missing > free:
        raise ModelProblem(
            f"{repository} needs {format_bytes(missing)} in {cache}, which has {format_bytes(free)} free",
            hint="make room there, or point HF_HUB_CACHE to a larger disk",
        )


class _Blobs:
    """The bytes of one repository in the cache."""

    def __init__(self, repository: str, cache: Path) -> None:
        self._folder = cache / f"models--{repository.replace('/', '--')}" / "blobs"

    def size(self, *, incomplete: bool) -> int:
        total = 0
        for path in self._folder.glob("*"):
            try:
                total += path.stat().st_size if incomplete or path.suffix != ".incomplete" else 0
            except FileNotFoundError:  # renamed on completion between the two calls
                continue
        return total


@contextmanager
def _reported(blobs: _Blobs, *, total: int, missing: int, progress: Callable[[int, int], None]) -> Iterator[None]:
    """Report twice a second how many bytes are on disk; what an earlier download left counts."""
    before = blobs.size(incomplete=False)
    finished = threading.Event()

    def report() -> None:
        done = total - missing + blobs.size(incomplete=True) - before
        progress(min(done, total), total)

    def watch() -> None:
        report()
        while not finished.wait(_REPORT_SECONDS):
            report()

    watcher = threading.Thread(target=watch, daemon=True)
    if missing:
        watcher.start()
    try:
        yield
    finally:
        finished.set()
        if missing:
            watcher.join()
            report()


@contextmanager
def _explained(repository: str, revision: str) -> Iterator[None]:
    """What the hub's client raises, in words for a person. The order is from the special to the general."""
    hub = _endpoint() or "huggingface.co"
    try:
        yield
    except GatedRepoError as error:
        raise ModelProblem(
            f"{repository} is gated: {hub} wants to know who you are",
            hint=f"ask for access at https://huggingface.co/{repository}, then set HF_TOKEN",
        ) from error
    except RepositoryNotFoundError as error:
        raise ModelProblem(
            f"{hub} has no model {repository}, or it is private",
            hint="check the spelling of org/name; for a private model set HF_TOKEN",
        ) from error
    except RevisionNotFoundError as error:
        raise ModelProblem(
            f"{repository} has no revision {revision}", hint="name a branch, tag or commit after the @"
        ) from error
    except LocalEntryNotFoundError as error:
        raise _unreachable(hub, repository, error.__cause__ or error) from error
    except (EntryNotFoundError, NotASafetensorsRepoError, SafetensorsParsingError) as error:
        raise ModelProblem(
            f"{repository} at {revision} is no model quire can serve: {_first_line(error)}",
            hint="it needs config.json and safetensors weights",
        ) from error
    except HfHubHTTPError as error:
        raise ModelProblem(f"{hub} refused {repository}: {_first_line(error)}") from error
    except (_TRANSPORT_ERROR, ConnectionError, TimeoutError) as error:
        raise _unreachable(hub, repository, error) from error
    except OSError as error:
        raise ModelProblem(f"{repository} can't be downloaded: {_first_line(error)}") from error


def _unreachable(hub: str, repository: str, error: BaseException) -> ModelProblem:
    return ModelProblem(
        f"{hub} can't be reached, and {repository} is not wholly in the cache: {_first_line(error)}",
        hint="check the network and HF_ENDPOINT, then run again; what was downloaded is kept and continued",
    )


def _first_line(error: BaseException) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0][:300]


def main(repository: str, revision: str, cache: str) -> int:
    """Download, and tell on standard output in JSON lines: progress, then path or problem."""

    def tell(**line: object) -> None:
        print(json.dumps(line), flush=True)

    try:
        path = download(repository, revision, Path(cache), progress=lambda done, total: tell(done=done, total=total))
    except ModelProblem as problem:
        tell(problem=problem.message, hint=problem.hint)
        return problem.exit_code
    tell(path=str(path))
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
