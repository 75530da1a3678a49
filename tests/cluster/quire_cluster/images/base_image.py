"""The base of the images: the image that the user names or, without a registry, one from Debian's packages.

Its name is a hash of its inputs, so a store that has it needs no other.
"""

import hashlib
import shlex
import tempfile
import time
from pathlib import Path
from typing import Final

from quire_cluster.errors import ComponentFailed, ImageBuildFailed
from quire_cluster.images.buildah import Buildah, ensure_tools
from quire_cluster.progress import Progress, minutes_and_seconds
from quire_cluster.shell import run

SUITE: Final = "bookworm"
PACKAGES: Final = ("python3", "python3-venv", "ca-certificates")
# Debian's own -slim images leave these out as well.
LEFT_OUT: Final = ("/usr/share/man/*", "/usr/share/locale/*", "/usr/share/doc/*")
KEPT: Final = ("/usr/share/doc/*/copyright",)
# Of the machine it is made on.
TRACES: Final = ("etc/hostname", "etc/resolv.conf")
DOCKERFILE: Final = 'FROM scratch\nADD base.tar /\nCMD ["bash"]\n'
_SECONDS: Final = 900


def bootstrap_command(archive: str) -> list[str]:
    """Return the command that bootstraps Debian into the tar file `archive`. Pure."""
    traces = " ".join(f'"$1"/{trace}' for trace in TRACES)
    return [
        "mmdebstrap",
        "--variant=minbase",
        f"--include={','.join(PACKAGES)}",
        *(f"--dpkgopt=path-exclude={path}" for path in LEFT_OUT),
        *(f"--dpkgopt=path-include={path}" for path in KEPT),
        f"--customize-hook=rm -f {traces}",
        SUITE,
        archive,
    ]


def debian_base() -> str:
    """Return the name of the image that `make_debian_base` creates."""
    recipe = shlex.join(bootstrap_command("base.tar")) + DOCKERFILE
    return f"localhost/quire-base:{SUITE}-{hashlib.sha256(recipe.encode()).hexdigest()[:8]}"


def ensure_base(buildah: Buildah, named: str | None, progress: Progress) -> str:
    """Provide the base image in the store. Raise ImageBuildFailed with a solution."""
    if named is None:
        base = debian_base()
        if not buildah.has(base):
            _make_debian_base(buildah, base, progress)
        return base
    if not buildah.has(named):
        progress.say(f"==> pulling {named}")
        try:
            buildah.pull(named, progress)
        except ImageBuildFailed as error:
            raise ImageBuildFailed(
                f"{error}\nBASE_IMAGE is {named}: name one that can be pulled from here, or leave BASE_IMAGE unset "
                "to have a base made of Debian's packages"
            ) from None
    return named


def _make_debian_base(buildah: Buildah, base: str, progress: Progress) -> None:
    ensure_tools(["mmdebstrap"], progress)
    started = time.monotonic()
    progress.say(f"==> making {base} of Debian's packages (BASE_IMAGE names another): about 45 seconds")
    with tempfile.TemporaryDirectory(prefix="base-", dir=buildah.store.parent) as scratch:
        try:
            run(bootstrap_command(f"{scratch}/base.tar"), seconds=_SECONDS)
        except ComponentFailed as error:
            raise ImageBuildFailed(
                f"{error}\n"
                "It needs Debian's package archive. Or set BASE_IMAGE to an image with Python 3.11 to 3.13 and venv."
            ) from None
        Path(scratch, "Dockerfile").write_text(DOCKERFILE)
        buildah.build(Path(scratch), image=base, progress=progress)
    progress.say(f"    made in {minutes_and_seconds(time.monotonic() - started)}")
