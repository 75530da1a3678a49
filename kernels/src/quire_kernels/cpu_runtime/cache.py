"""The disk cache of compiled workers.

It is the folder ``<fingerprint>/<storage>`` of ``NUMBA_CACHE_DIR`` or, if that is not set, of
``${XDG_CACHE_HOME:-~/.cache}/quire/numba``.

By default numba writes next to the sources, which may be read-only, and notices a change only in the file of the
function itself, not in the functions that it calls. The fingerprint therefore covers all CPU sources of this package,
so that old code never runs for changed sources. It also covers the CPU, because numba writes the index of a folder
without a lock: if two processes with different CPUs filled one folder, either result could end up under the other's
key. With one folder per CPU and storage type, both processes write the same content. Usually one of them compiles and
the others wait for it, see ``compile_lock``.
"""

import contextlib
import functools
import hashlib
import logging
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import numba
from numba.core.registry import cpu_target

from quire_kernels.cpu_runtime.compile_lock import CompileLocks
from quire_kernels.precompiled import NotUsable, Precompiled, build, link_all, taken

_log = logging.getLogger(__name__)


_LOCKS = CompileLocks()


@contextlib.contextmanager
def cache_folder(storage: str, worker: str) -> Iterator[bool]:
    """Set numba's cache folder for the compilation of a worker, which no other process compiles meanwhile.

    Yield False, and log it once, if no folder is writable.
    """
    folder = _folder()
    if folder is None:
        yield False
        return
    numba.config.CACHE_DIR = str(folder / storage)
    with _LOCKS.hold(folder / f"{storage}.{worker}.lock"):
        yield True


@functools.cache
def _folder() -> Path | None:
    try:
        folder = _base_folder() / fingerprint()
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
        _bring_precompiled(folder)
    except (OSError, RuntimeError) as error:  # Path.expanduser raises RuntimeError for a user without a home folder.
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
    """Return a hash of numba's version, the target CPU and all sources from which workers are compiled."""
    cpu = cpu_target.target_context.codegen().magic_tuple()
    return hashlib.sha256(repr((numba.__version__, build(), cpu)).encode()).hexdigest()[:16]
