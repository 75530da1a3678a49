"""Files that are read again when they change: by looking, at most once a second, when somebody uses them.

Looking follows links, so that a mounted Kubernetes Secret, whose links are swapped, is seen to change.
"""

from collections.abc import Callable
from pathlib import Path

_LOOK_SECONDS = 1.0

_Stamp = tuple[int, int, int] | None


class WatchedFiles:
    """Made before the files are read the first time: what changes while they are read is then seen as a change."""

    def __init__(self, files: tuple[Path, ...], now: Callable[[], float]) -> None:
        self._files = files
        self._now = now
        self._stamps = self._look()
        self._looked = now()

    def changed(self) -> bool:
        """Whether any was changed since the last time this was true. A file that went away has changed too."""
        if self._now() - self._looked < _LOOK_SECONDS:
            return False
        self._looked = self._now()
        before, self._stamps = self._stamps, self._look()
        return self._stamps != before

    def _look(self) -> tuple[_Stamp, ...]:
        return tuple(_stamp(file) for file in self._files)


def _stamp(file: Path) -> _Stamp:
    try:
        status = file.stat()
    except OSError:
        return None
    return status.st_mtime_ns, status.st_ino, status.st_size
