"""The unpacking of an image's layers into a folder: archives in order, and single files at the paths in their titles.

For ``image``. Only content below the folder that the source names is extracted, and nothing that would lead out of it.
Each layer can be applied again from its start, so a kill in the middle costs one layer.
"""

import os
import re
import shutil
import tarfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from enum import Enum
from gzip import GzipFile
from pathlib import Path, PurePosixPath
from typing import IO, BinaryIO, cast

from backports.zstd import ZstdError, ZstdFile

from quire_engine.errors import FetchError
from quire_engine.fetch.registry import Blob

KEPT = ".layers"
"""The subfolder of a version for blobs that are not applied yet, and for a mark per applied layer.

An image must not contain this name itself."""
_ARCHIVE = re.compile(r".*[.+]tar([.+](gzip|zstd))?")
_TITLES = ("org.opencontainers.image.title", "org.cncf.model.filepath")
_UNPACK = "io.deis.oras.content.unpack"
_ADVICE = "name the folder that holds the model and nothing else: oci://registry/name:tag/path"
_WHITEOUT, _OPAQUE = ".wh.", ".wh..wh..opq"
_GZIP, _ZSTD = b"\x1f\x8b", b"\x28\xb5\x2f\xfd"


class Kind(Enum):
    ARCHIVE = "archive"
    FILE = "file"


@dataclass(frozen=True, slots=True, kw_only=True)
class Layer:
    blob: Blob
    kind: Kind
    path: str
    """The path of a file; empty for an archive."""


def layer_of(blob: Blob, image: str) -> Layer:
    """Return a layer's kind, by its media type and title. Raise FetchError for a layer that is neither."""
    title = next((blob.annotations[name] for name in _TITLES if name in blob.annotations), "")
    if _ARCHIVE.fullmatch(blob.media_type) or blob.annotations.get(_UNPACK) == "true":
        return Layer(blob=blob, kind=Kind.ARCHIVE, path="")
    if not title:
        raise FetchError(
            f"{image} has a layer of type {blob.media_type or '(none)'}, which is not an archive and has no title",
            hint="use an image with tar layers, or an artifact with a file name as the title of each layer",
        )
    return Layer(blob=blob, kind=Kind.FILE, path=str(_inside(title, image)))


def apply(layer: Layer, source: Path, folder: Path, *, below: str, image: str, stopped: Callable[[], bool]) -> None:
    """Apply the layer whose blob is ``source`` to ``folder``. Raise FetchError and OSError."""
    if layer.kind is Kind.FILE:
        _check_parents(folder, PurePosixPath(layer.path), image)
        target = folder / layer.path
        target.parent.mkdir(parents=True, exist_ok=True)
        source.replace(target)
        return
    unpacking = _Unpacking(folder, PurePosixPath(below), image)
    try:
        with source.open("rb") as raw, opened(raw, stopped) as archive:
            for member in archive:
                unpacking.take(archive, member)
            unpacking.check_links()
    except (tarfile.TarError, ZstdError, EOFError, KeyError) as error:
        raise FetchError(f"a layer of {image} cannot be unpacked: {error}") from error


@contextmanager
def opened(raw: IO[bytes], stopped: Callable[[], bool]) -> Iterator[tarfile.TarFile]:
    """Open the archive in a stream. Its first bytes give the compression, whatever the media type says."""
    start = raw.read(4)
    stream = _Stream(raw, start, stopped)
    if start.startswith(_GZIP):
        plain: object = GzipFile(fileobj=cast(BinaryIO, stream))
    elif start == _ZSTD:
        plain = ZstdFile(cast(BinaryIO, stream))
    else:
        plain = stream
    with tarfile.open(fileobj=cast(BinaryIO, plain), mode="r|") as archive:
        yield archive


class _Stream:
    """A forward-only stream, which ends when the operation is stopped."""

    def __init__(self, raw: IO[bytes], start: bytes, stopped: Callable[[], bool]) -> None:
        self._raw, self._start, self._stopped = raw, start, stopped

    def read(self, size: int = -1) -> bytes:
        if self._stopped():
            raise InterruptedError
        if self._start:
            if 0 <= size < len(self._start):
                piece, self._start = self._start[:size], self._start[size:]
                return piece
            start, self._start = self._start, b""
            return start + self._raw.read(size if size < 0 else size - len(start))
        return self._raw.read(size)


class _Unpacking:
    """The unpacking of one archive over the result of the layers below it."""

    def __init__(self, folder: Path, below: PurePosixPath, image: str) -> None:
        self._folder, self._below, self._image = folder, below, image

    def take(self, archive: tarfile.TarFile, member: tarfile.TarInfo) -> None:
        path = _inside(member.name, self._image)
        if path.name.startswith(_WHITEOUT):
            self._remove(path)
        elif path.is_relative_to(self._below) and path.parts:
            self._extract(archive, member, path)

    def _remove(self, whiteout: PurePosixPath) -> None:
        gone = whiteout.parent
        if whiteout.name != _OPAQUE:
            gone = _inside(str(gone / whiteout.name.removeprefix(_WHITEOUT)), self._image)  # ".wh..." names ".."
        if not (gone.is_relative_to(self._below) or self._below.is_relative_to(gone)):
            return
        _check_parents(self._folder, whiteout, self._image)
        target = self._folder / gone
        if whiteout.name == _OPAQUE or not gone.parts:
            for child in target.iterdir() if target.is_dir() else ():
                if child.name != KEPT:
                    _clear(child)
        else:
            _clear(target)

    def _extract(self, archive: tarfile.TarFile, member: tarfile.TarInfo, path: PurePosixPath) -> None:
        self._check_link(member, path)
        _check_parents(self._folder, path, self._image)
        target = self._folder / path
        if not member.isdir() or target.is_symlink() or not target.is_dir():
            _clear(target)
        try:
            archive.extract(member, self._folder, filter="data")
        except tarfile.FilterError as error:
            raise FetchError(
                f"{self._image} contains an entry that is not safe to unpack: {error}", hint=_ADVICE
            ) from error
        if member.isfile():
            with target.open("rb") as file:
                os.fsync(file.fileno())

    def _check_link(self, member: tarfile.TarInfo, path: PurePosixPath) -> None:
        """Raise FetchError for a link out of the folder, whose target would not exist."""
        if member.issym():
            goal = os.path.normpath(path.parent / member.linkname)
        elif member.islnk():
            goal = os.path.normpath(member.linkname)
        else:
            return
        if not PurePosixPath(goal).is_relative_to(self._below) or goal.startswith(".."):
            raise FetchError(
                f"{self._image} contains the link {path} to {member.linkname}, which is outside the model's folder",
                hint=_ADVICE,
            )

    def check_links(self) -> None:
        """Raise FetchError for a link that leads out of the folder through links that were unpacked later."""
        root = Path(os.path.realpath(self._folder)) / self._below
        for parent, folders, files in os.walk(self._folder / self._below):
            for path in (Path(parent, name) for name in (*folders, *files)):
                if path.is_symlink() and not Path(os.path.realpath(path)).is_relative_to(root):
                    raise FetchError(
                        f"{self._image} contains the link {path.relative_to(self._folder)} "
                        "to a path outside the model's folder",
                        hint=_ADVICE,
                    )


def _check_parents(folder: Path, path: PurePosixPath, image: str) -> None:
    """Raise FetchError if the path goes through a link; nothing is written or removed there."""
    for parent in path.parents:
        if (folder / parent).is_symlink() and parent.parts:
            raise FetchError(f"{image} contains {path} below a link", hint=_ADVICE)


def _inside(name: str, image: str) -> PurePosixPath:
    """Return a path of the image relative to its root. Raise FetchError if it leads out of the image."""
    path = PurePosixPath(name.lstrip("/"))
    if ".." in path.parts or "\0" in name or path.parts[:1] == (KEPT,):
        raise FetchError(
            f"{image} contains the path {name!r}, which is outside the model's folder; the download was deleted"
        )
    return path


def _clear(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
