"""Real files for tests: parts of packages of PyPI, locked by hash and unpacked into the cache of the tests."""

import os
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

_REQUIREMENTS = Path(__file__).parents[2] / "requirements"


def installed(lock: str) -> Path:
    """Return the folder with the files that the only package of ``requirements/{lock}`` installs."""
    name, _ = _locked(lock)
    return _cached(name, lambda scratch: _pip("install", "--target", str(scratch), lock=lock))


def source(lock: str, *prefixes: str) -> Path:
    """Return the folder with the source distribution of the only package of ``requirements/{lock}``.

    With ``prefixes``, only the files whose path in the distribution starts with one of them are unpacked.
    """
    name, package = _locked(lock)

    def unpack(scratch: Path) -> None:
        _pip("download", "--no-binary", package, "-d", str(scratch), lock=lock)
        (archive,) = scratch.glob("*.tar.gz")
        with tarfile.open(archive) as packed:
            for member in packed:
                path = member.name.partition("/")[2]
                if path.startswith(prefixes or ("",)):
                    packed.extract(member.replace(name=path), scratch, filter="data")
        archive.unlink()

    return _cached(f"{name}-source", unpack)


def _locked(lock: str) -> tuple[str, str]:
    """Return the name of the cache's folder and the package's name."""
    requirement = (_REQUIREMENTS / lock).read_text(encoding="utf-8").split()[0]
    return requirement.replace("==", "-"), requirement.partition("==")[0]


def _pip(command: str, *arguments: str, lock: str) -> None:
    pip = [sys.executable, "-m", "pip", command, "--quiet", "--no-deps", "--require-hashes"]
    subprocess.run([*pip, *arguments, "-r", str(_REQUIREMENTS / lock)], check=True)


def _cached(name: str, fill: Callable[[Path], None]) -> Path:
    """Return a folder of the cache, filled once; of several processes that fill it, the first one wins."""
    home = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "quire"
    target = home / name
    if not target.is_dir():
        home.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=home) as scratch:
            filled = Path(scratch) / "filled"
            filled.mkdir()
            fill(filled)
            with suppress(OSError):
                filled.rename(target)
    return target
