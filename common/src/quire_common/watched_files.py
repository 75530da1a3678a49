"""Files that are read again when they change. Their state is checked when they are used, at most once a second.

The check follows links, so it notices when Kubernetes swaps the links of a mounted Secret.
"""

from collections.abc import Callable
from pathlib import Path

_CHECK_SECONDS = 1.0

_Stamp = tuple[int, int, int] | None


class WatchedFiles:
    """A set of files and the state in which they were last seen.

    Create it before the files are read the first time: then a change during that read is seen as a change.
    """

    def __init__(self, files: tuple[Path, ...], now: Callable[[], float]) -> None:
        self._files, self._now = files, now
        self._stamps, self._checked = self._read_stamps(), now()

    def changed(self) -> bool:
        """Return whether a file was changed or removed since the last call that returned true."""
        now = self._now()
        if now - self._checked < _CHECK_SECONDS:
            return False
        before, self._stamps, self._checked = self._stamps, self._read_stamps(), now
        return self._stamps != before

    def _read_stamps(self) -> tuple[_Stamp, ...]:
        return tuple(_stamp(file) for file in self._files)


def _stamp(file: Path) -> _Stamp:
    try:
        status = file.stat()
    except OSError:
        return None
    return status.st_mtime_ns, status.st_ino, status.st_size
