"""Measurements that are kept on disk between starts: ``${XDG_CACHE_HOME:-~/.cache}/quire/<kind>/<key>.json``.

A file that is damaged or of another machine counts as none, and a folder that cannot be written costs the measurement
at each start and nothing else: ``problem`` says so once, when a start begins.
"""

import contextlib
import hashlib
import os
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Protocol, TypeVar


class Measurement(Protocol):
    @property
    def facts(self) -> tuple[str, ...]:
        """Everything that determines the results."""
        ...


Kept = TypeVar("Kept", bound=Measurement)


def key_of(facts: Iterable[str]) -> str:
    """Return the name of the file that belongs to these facts."""
    return hashlib.sha256("\n".join(facts).encode()).hexdigest()[:16]


def file_of(kind: str, key: str) -> Path:
    """Return the path of a kept measurement. Raises RuntimeError for a user without a home folder."""
    return _folder() / kind / f"{key}.json"


def read(kind: str, facts: tuple[str, ...], type: type[Kept]) -> Kept | None:
    """Return what was kept for these facts; None where there is no whole file of this type."""
    import msgspec  # a machine that only runs the engine in process may lack it

    # msgspec raises UnicodeDecodeError, not an error of its own, for a text that is not UTF-8.
    with contextlib.suppress(OSError, RuntimeError, msgspec.DecodeError, UnicodeDecodeError):
        found = msgspec.json.decode(file_of(kind, key_of(facts)).read_bytes(), type=type, strict=True)
        return found if found.facts == facts else None
    return None


def write(kind: str, value: Measurement) -> None:
    """Write a value atomically under its facts, because several engines may start at once.

    A folder that cannot be written is not an error here.
    """
    import msgspec

    with contextlib.suppress(OSError, RuntimeError):
        file = file_of(kind, key_of(value.facts))
        file.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=file.parent, suffix=".part", delete=False) as part:
            try:
                part.write(msgspec.json.encode(value))
                part.flush()
                os.replace(part.name, file)
            except OSError:
                os.unlink(part.name)


def problem() -> str | None:
    """Return why measurements cannot be kept; None where they can."""
    try:
        folder = _folder()
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            return None
    except (OSError, RuntimeError) as error:
        return (
            f"the CPU is tried and layers are timed at every start, as the results cannot be kept: {error}; set"
            " XDG_CACHE_HOME to a writable folder"
        )


def _folder() -> Path:
    home = os.environ.get("XDG_CACHE_HOME")
    return (Path(home) if home else Path("~/.cache").expanduser()) / "quire"
