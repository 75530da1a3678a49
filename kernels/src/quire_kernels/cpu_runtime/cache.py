"""Where compiled workers are kept between starts: in ``<fingerprint>/<storage>`` of ``NUMBA_CACHE_DIR`` or, where that
is not set, of ``${XDG_CACHE_HOME:-~/.cache}/quire/numba``.

numba would write beside the sources, which may be read-only, and it notices a change only in the file of the function
itself, not in those it calls. The fingerprint is over all of this package's CPU sources, so a changed source is never
met by old code; and over the CPU, as numba's index of a folder is written without a lock: of two processes that fill
one folder at once, either may end up under the other's key. With a folder for each CPU and storage type both write
the same.
"""

import functools
import hashlib
import logging
import os
import tempfile
from pathlib import Path

import numba
from numba.core.registry import cpu_target

from quire_kernels.precompiled import NotUsable, Precompiled, build, link_all, taken

_log = logging.getLogger(__name__)


def use_cache_folder(storage: str) -> bool:
    """Points numba at the cache folder, before each compilation; False, and said once, when none can be written."""
    folder = _folder()
    if folder is not None:
        numba.config.CACHE_DIR = str(folder / storage)
    return folder is not None


@functools.cache
def _folder() -> Path | None:
    try:
        folder = _base_folder() / fingerprint()
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
        _bring_precompiled(folder)
    except (OSError, RuntimeError) as error:  # RuntimeError: a user without a home folder
        _log.warning("compiled kernels are not kept between starts: %s; set XDG_CACHE_HOME to a writable folder", error)
        return None
    return folder


def _base_folder() -> Path:
    if chosen := os.environ.get("NUMBA_CACHE_DIR"):
        return Path(chosen)
    home = os.environ.get("XDG_CACHE_HOME")
    return (Path(home) if home else Path("~/.cache").expanduser()) / "quire" / "numba"


def _bring_precompiled(folder: Path) -> None:
    match taken():
        case Precompiled(level=level, folder=source):
            link_all(source, folder)
            _log.info("CPU kernels: those compiled for %s ahead of time, from %s", level.name, source)
        case NotUsable(reason=reason):
            _log.warning("CPU kernels are compiled here, which takes some 20 CPU seconds: %s", reason)
        case None:
            pass


def fingerprint() -> str:
    """Of numba, the CPU that it compiles for and all sources that workers are compiled from."""
    cpu = cpu_target.target_context.codegen().magic_tuple()
    return hashlib.sha256(repr((numba.__version__, build(), cpu)).encode()).hexdigest()[:16]
