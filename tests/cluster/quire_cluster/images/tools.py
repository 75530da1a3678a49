"""The programs that images are made with: those of the machine, or Debian's, installed where that may be done.

buildah wants the configuration that its package brings, so that unpacking it beside the cache would not do.
"""

import os
import shutil
import subprocess
from collections.abc import Sequence
from typing import Final

from quire_cluster.errors import BinaryUnavailable
from quire_cluster.progress import Progress

_SECONDS: Final = 600
_OTHERWISE: Final = "With Docker: docker build --target engine -t quire-engine . (and operator, gateway)"


def ensure_tools(programs: Sequence[str], progress: Progress) -> None:
    """Raises BinaryUnavailable, which says what would be right."""
    if os.geteuid() != 0:
        raise BinaryUnavailable(f"images are built in a chroot, which only root may enter. {_OTHERWISE}")
    missing = [program for program in programs if shutil.which(program) is None]
    if not missing:
        return
    named = " and ".join(missing)
    if shutil.which("apt-get") is None:
        raise BinaryUnavailable(f"images are built with {named}, not found on the PATH: install it. {_OTHERWISE}")
    progress.say(f"==> installing {named} (apt-get install {' '.join(missing)})")
    problem = _install(missing)
    if problem is not None:
        # The lists may be missing, as in a fresh container, or older than the archive.
        _apt_get("update")
        problem = _install(missing)
    if problem is not None:
        raise BinaryUnavailable(f"images are built with {named}, which could not be installed: {problem}\n{_OTHERWISE}")


def _install(packages: Sequence[str]) -> str | None:
    return _apt_get("install", "--yes", "--no-install-recommends", *packages)


def _apt_get(*arguments: str) -> str | None:
    """The last words of what went wrong, or None."""
    done = subprocess.run(
        ["apt-get", "--quiet", *arguments],
        env=os.environ | {"DEBIAN_FRONTEND": "noninteractive"},
        capture_output=True,
        text=True,
        timeout=_SECONDS,
        check=False,
    )
    return None if done.returncode == 0 else (done.stderr.strip() or done.stdout.strip())[-500:]
