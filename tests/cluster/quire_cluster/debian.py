"""Programs from Debian packages: unpacked into the cache without root, or installed if unpacking is insufficient.

These are programs that the tests use unchanged: Prometheus, containerd. A program on the PATH takes precedence.
"""

import os
import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from quire_cluster.binaries import Binaries, cache_folder
from quire_cluster.errors import BinaryUnavailable, ComponentFailed
from quire_cluster.shell import run

FOLDERS: Final = ("usr/bin", "usr/sbin")
_SECONDS = 600


def debian_programs(package: str, programs: Sequence[str]) -> Binaries:
    """Return the paths of the programs. Raise BinaryUnavailable with the packages to install."""
    if (there := debian_programs_here(package, programs)) is not None:
        return there
    home = _home(package)
    _fetch(package, home)
    unpacked = _within(home, programs)
    if unpacked is None:
        raise BinaryUnavailable(f"the Debian package {package} has no {' and '.join(programs)} (unpacked in {home})")
    return unpacked


def debian_programs_here(package: str, programs: Sequence[str]) -> Binaries | None:
    """Return the paths without downloading, or None unless all are on the PATH or all in the cache."""
    found = {program: shutil.which(program) for program in programs}
    if all(found.values()):
        return {program: Path(path) for program, path in found.items() if path is not None}
    return _within(_home(package), programs)


def debian_folder(package: str, folder: str) -> Path:
    """Return a folder of the package, such as usr/lib/cni. Raise BinaryUnavailable."""
    if debian_folder_here(package, folder) is None:
        _fetch(package, _home(package))
    return _home(package) / folder


def debian_folder_here(package: str, folder: str) -> Path | None:
    """Return such a folder without downloading."""
    path = _home(package) / folder
    return path if path.is_dir() else None


def install_packages(packages: Sequence[str]) -> str | None:
    """Install packages as root into the system. Return the error, or None."""
    problem = _install(packages)
    if problem is not None:
        # The lists may be missing, as in a fresh container, or older than the archive.
        _apt_get("update")
        problem = _install(packages)
    return problem


def _install(packages: Sequence[str]) -> str | None:
    return _apt_get("install", "--yes", "--no-install-recommends", *packages)


def _apt_get(*arguments: str) -> str | None:
    return _problem("env", "DEBIAN_FRONTEND=noninteractive", "apt-get", "--quiet", *arguments)


def _home(package: str) -> Path:
    return cache_folder() / f"debian-{package}"


def _within(home: Path, programs: Sequence[str]) -> Binaries | None:
    """Return the paths of the programs below a folder, or None unless all exist."""
    found = {
        program: home / folder / program
        for program in programs
        for folder in FOLDERS
        if (home / folder / program).exists()
    }
    return found if len(found) == len(programs) else None


def _fetch(package: str, home: Path) -> None:
    for tool in ("apt-get", "dpkg-deb"):
        if shutil.which(tool) is None:
            raise BinaryUnavailable(f"{package} is needed and there is no {tool} to fetch it with: put it on the PATH")
    home.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f"{home.name}.incomplete-", dir=home.parent) as scratch:
        if _problem("apt-get", "download", package, cwd=scratch) is not None:
            # The lists may be missing, as in a fresh container, or older than the archive.
            if os.geteuid() == 0:
                _problem("apt-get", "-q", "update", cwd=scratch)
            problem = _problem("apt-get", "download", package, cwd=scratch)
            if problem is not None:
                raise BinaryUnavailable(
                    f"{package} is needed and could not be fetched: {problem}\nInstall it: apt-get install {package}"
                )
        (archive,) = Path(scratch).glob("*.deb")
        unpacked = Path(scratch) / "unpacked"
        problem = _problem("dpkg-deb", "-x", str(archive), str(unpacked), cwd=scratch)
        if problem is not None:
            raise BinaryUnavailable(f"{archive.name} could not be unpacked: {problem}")
        shutil.rmtree(home, ignore_errors=True)
        unpacked.rename(home)


def _problem(*command: str, cwd: str | None = None) -> str | None:
    """Run a command. Return its error, or None."""
    try:
        run(command, cwd=cwd, seconds=_SECONDS)
    except ComponentFailed as error:
        return str(error)
    return None
