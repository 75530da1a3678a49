"""What all places a model is fetched from have in common: files with sizes and checksums, and how to ask for them.

Implemented by ``hub_download``, ``bucket`` and ``image``; used by ``transfer``, which moves the bytes, and
``model_cache``, which keeps them. Every failure is a FetchError, or Unreachable where what was kept may still do.
"""

import hashlib
import ssl
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from fnmatch import fnmatch
from pathlib import Path
from typing import Protocol

from quire_engine.errors import FetchError

Progress = Callable[[int, int], None]
"""Bytes that are here, bytes in all."""
Say = Callable[[str], None]
"""A line for a person."""

_WANTED = ("*.json", "*.safetensors", "tokenizer.model", "vocab.txt", "merges.txt", "*.jinja")
"""What an engine reads: never pickles, never code."""
_SKIPPED = ("*/*", "consolidated*.safetensors")
"""Folders hold other formats of the same weights."""


class Unreachable(FetchError):
    """Nobody answers there, or it may not be asked."""


class Algorithm(StrEnum):
    SHA256 = "SHA-256"
    MD5 = "MD5"
    GIT = "git blob SHA-1"
    """Of the file with its length before it, as git names what it keeps."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Checksum:
    algorithm: Algorithm
    hex: str

    def start(self, size_bytes: int) -> "hashlib._Hash":
        """What the bytes are fed to."""
        match self.algorithm:
            case Algorithm.SHA256:
                return hashlib.sha256()
            case Algorithm.MD5:
                return hashlib.md5(usedforsecurity=False)
            case Algorithm.GIT:
                return hashlib.sha1(f"blob {size_bytes}\0".encode(), usedforsecurity=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class RemoteFile:
    name: str
    """Where it is kept, below the folder of its version."""
    size_bytes: int
    checksum: Checksum | None
    """None where the place gives none that could be checked."""
    address: str
    """Where its origin finds it."""
    tag: str = ""
    """The entity tag that it must still have; empty where its address can't change its content."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Listing:
    """One version of a model, as it is there now."""

    model: str
    """As messages name it."""
    version: str
    """A file name; equal only for equal files."""
    files: tuple[RemoteFile, ...]
    spare_bytes: int = 0
    """Room needed for a while beside the files themselves."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    url: str
    headers: Mapping[str, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """One that brought no file."""

    status: int
    body: bytes
    headers: Mapping[str, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Description:
    """What can be known of a model without its weights."""

    config: object
    parameters: int | None
    """None where the weights could not be asked."""


class Origin(Protocol):
    """One source. The methods block, and are called in a thread."""

    def listing(self) -> Listing:
        """What there is now."""
        ...

    def describe(self) -> Description:
        """Configuration and number of parameters, for some kilobytes."""
        ...

    def elsewhere(self, listing: Listing) -> Path | None:
        """A folder of this machine that has all of it already."""
        ...

    def request(self, file: RemoteFile) -> Request:
        """How to ask for a file now."""
        ...

    def refusal(self, file: RemoteFile, answer: Answer) -> FetchError | None:
        """Why it was refused; None where asking anew may do."""
        ...

    def unreachable(self, error: BaseException) -> Unreachable:
        """That the network failed too often."""
        ...

    def trust(self) -> ssl.SSLContext | bool:
        """Whose certificates are believed; True is the usual ones."""
        ...

    def is_applied(self, file: RemoteFile, folder: Path) -> bool:
        """Whether a file that is gone from ``folder`` has been made into what it is for."""
        ...

    def finish(self, listing: Listing, folder: Path, *, say: Say, stopped: Callable[[], bool]) -> None:
        """Make the model of the files, all of which are in ``folder``. Goes on where it was cut off."""
        ...

    def model_folder(self, whole: Path) -> Path:
        """The model in the folder of its version; FetchError if it is not in there."""
        ...


class PlainFiles:
    """For origins whose files are the model."""

    def elsewhere(self, listing: Listing) -> Path | None:
        return None

    def trust(self) -> ssl.SSLContext | bool:
        return True

    def is_applied(self, file: RemoteFile, folder: Path) -> bool:
        return False

    def finish(self, listing: Listing, folder: Path, *, say: Say, stopped: Callable[[], bool]) -> None:
        return None

    def model_folder(self, whole: Path) -> Path:
        return whole


def is_wanted(name: str) -> bool:
    """Whether an engine reads a file of this name, relative to the model's folder."""
    return any(fnmatch(name, pattern) for pattern in _WANTED) and not any(fnmatch(name, p) for p in _SKIPPED)


def check_weights(model: str, names: Sequence[str]) -> None:
    """Raise FetchError unless there are weights among the files."""
    if not any(name.endswith(".safetensors") for name in names):
        raise FetchError(
            f"{model} has no safetensors weights",
            hint="quire reads only safetensors; convert the model or choose another",
        )


def first_line(error: BaseException) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0][:300]
