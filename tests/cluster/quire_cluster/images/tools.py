"""The programs that build images: those of the machine, or Debian's, installed if permitted.

buildah needs the configuration of its package, so unpacking it into the cache is insufficient.
"""

import os
import shutil
from collections.abc import Sequence
from typing import Final

from quire_cluster.debian import install_packages
from quire_cluster.errors import BinaryUnavailable
from quire_cluster.progress import Progress

_OTHERWISE: Final = "With Docker: docker build --target engine -t quire-engine . (and operator, gateway)"


def ensure_tools(programs: Sequence[str], progress: Progress) -> None:
    """Provide the programs. Raise BinaryUnavailable with a solution."""
    if os.geteuid() != 0:
        raise BinaryUnavailable(f"images are built in a chroot, which only root may enter. {_OTHERWISE}")
    missing = [program for program in programs if shutil.which(program) is None]
    if not missing:
        return
    named = " and ".join(missing)
    if shutil.which("apt-get") is None:
        raise BinaryUnavailable(f"images are built with {named}, not found on the PATH: install it. {_OTHERWISE}")
    progress.say(f"==> installing {named} (apt-get install {' '.join(missing)})")
    problem = install_packages(missing)
    if problem is not None:
        raise BinaryUnavailable(f"images are built with {named}, which could not be installed: {problem}\n{_OTHERWISE}")
