"""Run buildah with our own store in the cache: build, push and describe images.

`--isolation chroot` needs neither a daemon nor a container runtime. The store is one folder, used by one run at a time.
"""

import json
import os
import shutil
import subprocess
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

from quire_cluster.binaries import alone, cache_folder
from quire_cluster.debian import install_packages
from quire_cluster.errors import BinaryUnavailable, ImageBuildFailed
from quire_cluster.progress import Progress, minutes_and_seconds
from quire_cluster.shell import follow

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


RUN_FOLDER: Final = Path("/run/quire-images")
LAST_LINES: Final = 20
NOISE: Final = ("time=", "--> ")  # its log, and the ids of layers
# Measured on the engine's image: a layer per dependency group.
COMPRESSION: Final = ("--compression-format", "zstd", "--compression-level", "1")


class Buildah:
    """A store with the overlay driver, because with vfs every step would copy the whole image (5 GB for the engine's).

    `scratch` contains layers while they are built: complete, and twice.
    """

    def __init__(self, store: Path, scratch: Path) -> None:
        self.store = store
        self.scratch = scratch
        self._command = ("buildah", f"--root={store}", f"--runroot={RUN_FOLDER}", "--storage-driver=overlay")

    def has(self, image: str) -> bool:
        asked = self._run("inspect", "--type=image", "--format={{.FromImageID}}", image)
        return asked.returncode == 0

    def build(
        self,
        context: Path,
        *,
        image: str,
        target: str | None = None,
        arguments: Mapping[str, str] | None = None,
        volumes: Sequence[str] = (),
        progress: Progress,
    ) -> None:
        """Build an image. Index addresses are passed in the environment, because any user can read command lines."""
        options = [f"--target={target}"] if target is not None else []
        options += [f"--build-arg={name}={value}" for name, value in (arguments or {}).items()]
        options += [f"--volume={volume}" for volume in volumes]
        addresses = _index_addresses()
        options += [f"--build-arg={name}" for name in addresses]
        command = [*self._command, "build", "--isolation=chroot", "--network=host", "--layers", "--force-rm"]
        self._follow([*command, "--pull-never", f"--tag={image}", *options, str(context)], image, progress, addresses)

    def pull(self, image: str, progress: Progress) -> None:
        self._follow([*self._command, "pull", image], image, progress)

    def push(self, image: str, destination: str, *, plain_http: bool, progress: Progress) -> None:
        trust = [] if not plain_http else ["--tls-verify=false"]
        command = [*self._command, "push", *trust, *COMPRESSION, image, f"docker://{destination}"]
        self._follow(command, destination, progress)

    def rename(self, image: str, name: str) -> None:
        self._checked("tag", image, name)
        self._checked("rmi", image)

    def description(self, image: str) -> Mapping[str, Any]:
        """Return the image's configuration and history in the format of the OCI image specification."""
        return dict(json.loads(self._checked("inspect", "--type=image", image))["OCIv1"])

    def unpacked_sizes(self) -> Mapping[str, int]:
        """Return the size of each layer in bytes by its digest."""
        known = self.store / "overlay-layers" / "layers.json"
        layers = json.loads(known.read_text()) if known.exists() else []
        return {layer["diff-digest"]: layer.get("diff-size", 0) for layer in layers if "diff-digest" in layer}

    def remove_containers(self) -> None:
        """Remove the mounted containers that a build leaves for each stage that others mount."""
        self._run("rm", "--all")

    def remove_images(self) -> None:
        self._checked("rmi", "--all", "--force")

    @contextmanager
    def mounted(self, image: str) -> Iterator["Container"]:
        """Provide a container of the image with accessible files, and remove it afterwards."""
        name = self._checked("from", "--pull-never", image).strip()
        try:
            yield Container(self, name, Path(self._checked("mount", name).strip()))
        finally:
            self._run("rm", name)

    def run(self, container: str, *command: str) -> "subprocess.CompletedProcess[str]":
        return self._run("run", "--isolation=chroot", "--network=host", container, "--", *command)

    def _checked(self, *arguments: str) -> str:
        done = self._run(*arguments)
        if done.returncode != 0:
            raise ImageBuildFailed(f"buildah {arguments[0]} failed: {done.stderr.strip()[-1000:]}")
        return done.stdout

    def _run(self, *arguments: str) -> "subprocess.CompletedProcess[str]":
        command = [*self._command, *arguments]
        return subprocess.run(command, env=self._environment(), capture_output=True, text=True, check=False)

    def _environment(self) -> dict[str, str]:
        return os.environ | {"TMPDIR": str(self.scratch)}

    def _follow(
        self, command: Sequence[str], what: str, progress: Progress, more_environment: Mapping[str, str] | None = None
    ) -> None:
        """Report the current step and, on failure, the last lines."""
        environment = self._environment() | dict(more_environment or {})
        started = time.monotonic()
        last: deque[str] = deque(maxlen=LAST_LINES)

        def see(line: str) -> None:
            if not line.startswith(NOISE):
                last.append(line[:300])
                progress.update(f"    {minutes_and_seconds(time.monotonic() - started)}: {line[:100]}")

        status = follow(command, environment=environment, see=see)
        if status != 0:
            quoted = "\n".join(f"    {line}" for line in last)
            raise ImageBuildFailed(f"{what}: buildah ended with status {status}. Its last lines:\n{quoted}")


class Container:
    """A container in which only requested commands run."""

    def __init__(self, buildah: Buildah, name: str, root: Path) -> None:
        self.root = root
        self._buildah = buildah
        self._name = name

    def run(self, *command: str) -> "subprocess.CompletedProcess[str]":
        """Run a command as the image's own user."""
        return self._buildah.run(self._name, *command)


def _index_addresses() -> Mapping[str, str]:
    """Return the package index addresses of this machine for both installers of the build."""
    pip = os.environ.get("PIP_INDEX_URL")
    uv = os.environ.get("UV_DEFAULT_INDEX") or pip
    return {name: value for name, value in {"PIP_INDEX_URL": pip, "UV_DEFAULT_INDEX": uv}.items() if value}


FREE_BYTES_TO_BUILD: Final = 14_000_000_000  # the engine's layers, and the largest of them twice more while it is made
MOST_BYTES_KEPT: Final = 20_000_000_000  # three generations of the engine's dependencies


@contextmanager
def store(progress: Progress | None) -> Iterator[Buildah]:
    """Lock the store. Without `progress`, buildah must be installed."""
    if progress is not None:
        ensure_tools(["buildah"], progress)
    home = folder()
    home.mkdir(parents=True, exist_ok=True)
    with alone(home / "lock", "the images", progress):
        scratch = home / "scratch"
        shutil.rmtree(scratch, ignore_errors=True)  # left by a killed run; only the holder of the lock is here
        scratch.mkdir()
        buildah = Buildah(home / "storage", scratch)
        buildah.remove_containers()
        try:
            yield buildah
        finally:
            buildah.remove_containers()


def folder() -> Path:
    return cache_folder() / "images"


def make_room(buildah: Buildah, progress: Progress) -> None:
    """Free space before a build. Raise ImageBuildFailed if the build would fill the disk.

    It is unknown which old layers a later build could use, so a store that has grown too large is removed completely.
    """
    kept = sum(buildah.unpacked_sizes().values())
    if kept > MOST_BYTES_KEPT:
        progress.say(f"==> {kept / 1e9:.0f} GB of layers from earlier builds: removing them all")
        buildah.remove_images()
    free = shutil.disk_usage(buildah.store.parent).free
    if free < FREE_BYTES_TO_BUILD:
        raise ImageBuildFailed(
            f"building the images takes {FREE_BYTES_TO_BUILD / 1e9:.0f} GB of disk in {buildah.store.parent}, and "
            f"{free / 1e9:.1f} GB are free: free some, or set XDG_CACHE_HOME to a folder on a larger disk"
        )
