"""The store of images between runs: one folder in the cache, used by one run at a time."""

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from quire_cluster.binaries import alone, cache_folder
from quire_cluster.errors import ImageBuildFailed
from quire_cluster.images.buildah import Buildah
from quire_cluster.images.tools import ensure_tools
from quire_cluster.progress import Progress

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
