"""The common part of all model sources: files with sizes and checksums, and the requests for them.

Implemented by ``hub`` and ``bucket``; used by ``transfer``, which downloads the files, and ``model_cache``,
which keeps them. Every failure is a FetchError, or Unreachable if a cached version may be used instead.
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
"""A function that gets the downloaded bytes and the total bytes."""
Say = Callable[[str], None]
"""A function that prints a line for a person."""

_WANTED = ("*.json", "*.safetensors", "tokenizer.model", "vocab.txt", "merges.txt", "*.jinja")
"""The files that an engine reads: never pickles, never code."""
_SKIPPED = ("*/*", "consolidated*.safetensors")
"""Subfolders contain other formats of the same weights."""


class Unreachable(FetchError):
    """An error for a server that does not answer or may not be accessed."""


class Algorithm(StrEnum):
    SHA256 = "SHA-256"
    MD5 = "MD5"
    GIT = "git blob SHA-1"
    """The SHA-1 of the length and the content, as git computes it for its objects."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Checksum:
    algorithm: Algorithm
    hex: str

    def start(self, size_bytes: int) -> "hashlib._Hash":
        """Return the hash object for the file's bytes."""
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
    """The file's path below the folder of its version."""
    size_bytes: int
    checksum: Checksum | None
    """None if the source provides no verifiable checksum."""
    address: str
    """The file's address within its origin."""
    tag: str = ""
    """The required entity tag; empty if the address already identifies the content."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Listing:
    """One version of a model, with its current files."""

    model: str
    """The model's name in messages."""
    version: str
    """A file name; equal only for equal files."""
    files: tuple[RemoteFile, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class FileRequest:
    url: str
    headers: Mapping[str, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """An answer that contains no file."""

    status: int
    body: bytes
    headers: Mapping[str, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelDescription:
    """The facts about a model that are known without its weights."""

    config: object
    parameters: int | None
    """None if the weights' headers could not be read."""


class Origin(Protocol):
    """A source of models. The methods block, and are called in a thread."""

    def listing(self) -> Listing:
        """Return the current version and its files."""
        ...

    def describe(self) -> ModelDescription:
        """Return configuration and number of parameters by downloading a few kilobytes."""
        ...

    def elsewhere(self, listing: Listing) -> Path | None:
        """Return a folder on this machine that already has all files, or None."""
        ...

    def request(self, file: RemoteFile) -> FileRequest:
        """Return the request for a file, valid now."""
        ...

    def refusal(self, file: RemoteFile, answer: Answer) -> FetchError | None:
        """Return the error for an answer, or None if another attempt may succeed."""
        ...

    def unreachable(self, error: BaseException) -> Unreachable:
        """Return the error after the network failed too often."""
        ...

    def trust(self) -> ssl.SSLContext | bool:
        """Return the trusted certificates; True means the default ones."""
        ...


class PlainFiles:
    """A base for origins whose files are nowhere else, with the usual certificates."""

    def elsewhere(self, listing: Listing) -> Path | None:
        return None

    def trust(self) -> ssl.SSLContext | bool:
        return True


def is_wanted(name: str) -> bool:
    """Return whether an engine reads a file of this name, relative to the model's folder."""
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
