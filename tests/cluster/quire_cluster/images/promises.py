"""Inspection of each image in a container, before it is pushed: the requirements of the Dockerfile.

All violations are reported at once.
"""

import os
import stat
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

from quire_cluster.errors import ImageBuildFailed
from quire_cluster.images.buildah import Buildah, Container

USER: Final = "65532:65532"
# Installers, and a compiler unless requested. (setuptools is a dependency of torch.)
TOOLS: Final = ("pip", "uv")
COMPILERS: Final = ("gcc", "cc")
ENVIRONMENT: Final = Path("opt/quire")
# Locations of the machine's own settings, which a build could copy into an image.
SETTINGS: Final = ("etc/pip.conf", "etc/uv", "root/.config", "var/cache/uv", "opt/tools", "src")


def check_promises(buildah: Buildah, image: str, *, program: str, compiler: bool) -> None:
    """Inspect an image. Raise ImageBuildFailed with all violations."""
    broken = list(_of_configuration(buildah.description(image)["config"], program))
    with buildah.mounted(image) as container:
        broken += _of_files(container.root)
        broken += [] if compiler else _of_compilers(container.root)
        broken += _of_program(container, program)
    if broken:
        listed = "\n".join(f"    {line}" for line in broken)
        raise ImageBuildFailed(f"{image} does not meet the requirements of the Dockerfile:\n{listed}")


def _of_configuration(configuration: Mapping[str, Any], program: str) -> Iterator[str]:
    if configuration.get("User") != USER:
        yield f"it runs as {configuration.get('User') or 'root'}; it has to be {USER}"
    if configuration.get("Entrypoint") != [program]:
        yield f"its entrypoint is {configuration.get('Entrypoint')}; it has to be {program}"
    for entry in configuration.get("Env", ()):
        if "INDEX" in entry.partition("=")[0]:
            yield f"its environment has {entry.partition('=')[0]}: an image must not contain package index addresses"


def _of_files(root: Path) -> Iterator[str]:
    yield from (f"/{found.relative_to(root)} is setuid or setgid" for found in _privileged(root))
    packages = {
        path.name.partition("-")[0] for path in (root / ENVIRONMENT).glob("lib/python3*/site-packages/*.dist-info")
    }
    yield from (f"{tool} is installed in /{ENVIRONMENT}" for tool in TOOLS if tool in packages)
    yield from (f"/{left} is of the build or of the machine it ran on" for left in SETTINGS if (root / left).exists())
    if not (root / "licenses" / "LICENSE").is_file():
        yield "/licenses/LICENSE is missing"


def _privileged(root: Path) -> Iterator[Path]:
    for folder, _, names in os.walk(root):
        for name in names:
            path = Path(folder, name)
            mode = path.lstat().st_mode
            if stat.S_ISREG(mode) and mode & (stat.S_ISUID | stat.S_ISGID):
                yield path


def _of_compilers(root: Path) -> Iterator[str]:
    yield from (f"/usr/bin/{name} is there" for name in COMPILERS if os.path.lexists(root / "usr/bin" / name))


def _of_program(container: Container, program: str) -> Iterator[str]:
    for command in ((program, "--version"), (program, "--help")):
        done = container.run(*command)
        if done.returncode != 0 or not done.stdout.strip():
            said = (done.stderr or done.stdout).strip()[-500:]
            yield f"`{' '.join(command)}` ended with status {done.returncode}: {said}"
    done = container.run("id", "-u")
    if done.stdout.strip() != USER.partition(":")[0]:
        yield f"a process in it has the user id {done.stdout.strip() or done.stderr.strip()[-200:]}"
