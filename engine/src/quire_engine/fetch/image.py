"""oci:// as an ``Origin``: the layers of an image or artifact in a registry, unpacked into the model's folder.

Blobs are downloaded to ``.layers`` in the version's folder, applied in order, and deleted one by one, so the additional
space is that of one layer.
"""

import json
import shutil
import tarfile
from collections.abc import Callable, Sequence
from functools import cached_property, partial
from pathlib import Path, PurePosixPath
from typing import IO, cast

from backports.zstd import ZstdError

from quire_common.model_source import ImageSource
from quire_common.quantities import format_bytes
from quire_common.safetensors_header import NoWeights, count_parameters
from quire_engine.errors import FetchError
from quire_engine.fetch.image_layers import KEPT, Kind, Layer, apply, layer_of, opened
from quire_engine.fetch.registry import Registry
from quire_engine.fetch.remote_files import (
    Algorithm,
    Answer,
    Checksum,
    FileRequest,
    Listing,
    ModelDescription,
    PlainFiles,
    RemoteFile,
    Say,
    Unreachable,
    check_weights,
    is_wanted,
)

_LOOKED_THROUGH_BYTES = 16 << 20
"""The part of an archive that is searched for config.json."""
_MAX_CONFIG_BYTES = 8 << 20


class ImageOrigin(PlainFiles):
    """The image, or the folder in it that the source names."""

    def __init__(self, source: ImageSource) -> None:
        self._source = source
        self._refused: set[str] = set()

    @cached_property
    def _registry(self) -> Registry:
        return Registry(self._source)

    @cached_property
    def _digest_and_layers(self) -> tuple[str, tuple[Layer, ...]]:
        manifest = self._registry.manifest()
        layers = [layer_of(blob, self._source.image) for blob in manifest.layers]
        kept = tuple(layer for layer in layers if layer.kind is Kind.ARCHIVE or self._is_wanted(layer.path))
        if not any(layer.kind is Kind.ARCHIVE for layer in kept):
            check_weights(str(self._source), [layer.path for layer in kept])
        return manifest.digest, kept

    def listing(self) -> Listing:
        digest, layers = self._digest_and_layers
        files = {_file(layer).name: _file(layer) for layer in layers}
        archives = [layer.blob.size_bytes for layer in layers if layer.kind is Kind.ARCHIVE]
        return Listing(
            model=self._source.image,
            version=digest.replace(":", "-"),
            files=tuple(files.values()),
            spare_bytes=max(archives, default=0),
        )

    def request(self, file: RemoteFile) -> FileRequest:
        return FileRequest(url=self._registry.blob_url(file.address), headers=self._registry.headers())

    def refusal(self, file: RemoteFile, answer: Answer) -> FetchError | None:
        if answer.status == 401 and file.name not in self._refused:
            self._refused.add(file.name)
            self._registry.forget_token()  # The token may just have expired.
            return None
        return self._registry.refusal(answer)

    def unreachable(self, error: BaseException) -> Unreachable:
        return self._registry.unreachable(error)

    def is_applied(self, file: RemoteFile, folder: Path) -> bool:
        _, layers = self._digest_and_layers
        places = [place for place, layer in enumerate(layers) if layer.blob.digest == file.address]
        return all(_mark(folder, place).exists() for place in places)

    def finish(self, listing: Listing, folder: Path, *, say: Say, stopped: Callable[[], bool]) -> None:
        _, layers = self._digest_and_layers
        for place, layer in enumerate(layers):
            blob = folder / _file(layer).name
            if not _mark(folder, place).exists():
                if layer.kind is Kind.ARCHIVE:
                    size = format_bytes(layer.blob.size_bytes)
                    say(f"{self._source}: unpacking layer {place + 1} of {len(layers)}, {size}")
                self._apply(layer, blob, folder, stopped)
                _mark(folder, place).touch()
            if all(layer.blob.digest != later.blob.digest for later in layers[place + 1 :]):
                blob.unlink(missing_ok=True)
        self.model_folder(folder)

    def _apply(self, layer: Layer, blob: Path, folder: Path, stopped: Callable[[], bool]) -> None:
        if layer.kind is Kind.FILE:
            # Two files with equal content are one blob.
            blob = Path(shutil.copyfile(blob, blob.with_name(f"{blob.name}.copy"))) if self._is_shared(layer) else blob
        apply(layer, blob, folder, below=self._source.path, image=self._source.image, stopped=stopped)

    def _is_shared(self, layer: Layer) -> bool:
        _, layers = self._digest_and_layers
        return sum(other.blob.digest == layer.blob.digest for other in layers) > 1

    def model_folder(self, whole: Path) -> Path:
        folder = whole / self._source.path
        if not folder.is_dir():
            raise FetchError(
                f"{self._source.image} has no folder {self._source.path}", hint="check the path after its tag"
            )
        return folder

    def describe(self) -> ModelDescription:
        """See ``Origin``. Only the beginning of archives is searched."""
        _, layers = self._digest_and_layers
        files = {PurePosixPath(layer.path).name: layer for layer in layers if layer.kind is Kind.FILE}
        if "config.json" in files:
            blob = files["config.json"].blob
            weights = [layer for name, layer in files.items() if name.endswith(".safetensors")]
            body = self._registry.read(blob.digest, 0, min(blob.size_bytes, _MAX_CONFIG_BYTES))
            return ModelDescription(config=self._parsed(body), parameters=self._count(weights) if weights else None)
        body = self._from_archives([layer for layer in layers if layer.kind is Kind.ARCHIVE])
        return ModelDescription(config=self._parsed(body), parameters=None)

    def _from_archives(self, layers: Sequence[Layer]) -> bytes:
        wanted = PurePosixPath(self._source.path) / "config.json"
        for layer in reversed(layers):  # The last layer wins.
            found = _member(_Ranges(self._registry, layer), wanted)
            if found is not None:
                return found
        raise FetchError(
            f"no layer of {self._source.image} has {wanted} within its first {format_bytes(_LOOKED_THROUGH_BYTES)}",
            hint=f"quire fetch {self._source} --to DIR, then plan with source: file:///DIR",
        )

    def _parsed(self, body: bytes) -> object:
        try:
            return json.loads(body)
        except (ValueError, RecursionError) as error:
            raise FetchError(f"config.json of {self._source} cannot be read as JSON: {error}") from error

    def _count(self, weights: Sequence[Layer]) -> int:
        total = 0
        for layer in weights:
            try:
                total += count_parameters(partial(self._registry.read, layer.blob.digest), layer.blob.size_bytes)
            except NoWeights as error:
                raise FetchError(
                    f"{layer.path} of {self._source} is not a complete safetensors file: {error}"
                ) from error
        return total

    def _is_wanted(self, path: str) -> bool:
        place = PurePosixPath(path)
        return place.is_relative_to(self._source.path) and is_wanted(str(place.relative_to(self._source.path)))


class _Ranges:
    """The beginning of a blob as a readable file."""

    _PIECE = 1 << 20

    def __init__(self, registry: Registry, layer: Layer) -> None:
        self._registry, self._blob = registry, layer.blob
        self._at, self._left = 0, b""

    def read(self, size: int = -1) -> bytes:
        while len(self._left) < size and self._at < min(self._blob.size_bytes, _LOOKED_THROUGH_BYTES):
            piece = self._registry.read(self._blob.digest, self._at, self._PIECE)
            if not piece:
                break  # The blob is shorter than the manifest says.
            self._at += len(piece)
            self._left += piece
        found, self._left = self._left[:size], self._left[size:]
        return found


def _member(stream: _Ranges, wanted: PurePosixPath) -> bytes | None:
    """Return a file of an archive whose end may be missing, or None."""
    try:
        with opened(cast(IO[bytes], stream), lambda: False) as archive:
            for member in archive:
                if PurePosixPath(member.name.lstrip("/")) == wanted and member.isfile():
                    content = archive.extractfile(member)
                    return None if content is None else content.read(_MAX_CONFIG_BYTES)
    except (tarfile.TarError, ZstdError, EOFError, OSError):
        return None
    return None


def _file(layer: Layer) -> RemoteFile:
    digest = layer.blob.digest
    checksum = Checksum(algorithm=Algorithm.SHA256, hex=digest.removeprefix("sha256:"))
    name = f"{KEPT}/{digest.replace(':', '-')}"
    return RemoteFile(name=name, size_bytes=layer.blob.size_bytes, checksum=checksum, address=digest)


def _mark(folder: Path, place: int) -> Path:
    return folder / KEPT / f"{place}.applied"
