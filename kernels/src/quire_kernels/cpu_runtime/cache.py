"""Where compiled workers are kept between starts: ``${XDG_CACHE_HOME:-~/.cache}/quire/numba/<fingerprint>``, or under
``NUMBA_CACHE_DIR`` where that is set.

numba would write beside the sources, which may be read-only, and it notices a change only in the file of the function
itself, not in those it calls. The fingerprint is over all of this package's CPU sources, so a changed source is never
met by old code.
"""

import functools
import hashlib
import logging
import os
import tempfile
from pathlib import Path

import numba

_log = logging.getLogger(__name__)


@functools.cache
def use_cache_folder() -> bool:
    """Points numba at the cache folder; False, and said once, when no such folder can be written."""
    try:
        folder = _base_folder() / _fingerprint()
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except (OSError, RuntimeError) as error:  # RuntimeError: a user without a home folder
        _log.warning("compiled kernels are not kept between starts: %s; set XDG_CACHE_HOME to a writable folder", error)
        return False
    numba.config.CACHE_DIR = str(folder)
    return True


def _base_folder() -> Path:
    if chosen := os.environ.get("NUMBA_CACHE_DIR"):
        return Path(chosen)
    home = os.environ.get("XDG_CACHE_HOME")
    return (Path(home) if home else Path("~/.cache").expanduser()) / "quire" / "numba"


def _fingerprint() -> str:
    digest = hashlib.sha256(numba.__version__.encode())
    root = Path(__file__).parent.parent
    for source in sorted([*root.glob("*/cpu.py"), *root.glob("cpu_runtime/*.py")]):
        digest.update(source.read_bytes())
    return digest.hexdigest()[:16]
