"""The images of this checkout, in a registry: built where something changed, checked, pushed; else nothing is done.

In this order for each image: its tag is worked out; a registry that has it is enough; a store that has it pushes; else
it is built, held to the Dockerfile's promises and pushed.
"""

import fcntl
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from quire_cluster.binaries import cache_folder
from quire_cluster.images.base_image import ensure_base
from quire_cluster.images.buildah import Buildah
from quire_cluster.images.dockerfile import Dockerfile, parse
from quire_cluster.images.fingerprint import fingerprint
from quire_cluster.images.image import TARGETS, WHEEL_FOLDER, BuildOptions, Image, Images
from quire_cluster.images.listing import ImageLayers, layers_of
from quire_cluster.images.promises import check_promises
from quire_cluster.images.registry import Registry
from quire_cluster.images.tools import ensure_tools
from quire_cluster.progress import Progress, minutes_and_seconds

CONTEXT: Final = Path(__file__).parents[4]


def images_of(registry: str, options: BuildOptions) -> Images:
    """Which images those of this checkout are; builds none."""
    dockerfile = parse((CONTEXT / "Dockerfile").read_text())
    return Images(**{target: _image(dockerfile, registry, target, options) for target in TARGETS})


def _image(dockerfile: Dockerfile, registry: str, target: str, options: BuildOptions) -> Image:
    tag = fingerprint(CONTEXT, dockerfile, target, options.arguments)
    return Image(registry=registry, repository=f"quire-{target}", tag=tag)


def ensure_images(registry: str, progress: Progress, options: BuildOptions | None = None) -> Images:
    """All three in the registry. Raises ClusterError, which says what would be right."""
    chosen = options or BuildOptions.from_environment(os.environ)
    images = images_of(registry, chosen)
    remote = _registry(registry)
    missing = [each for each in images.by_target().items() if remote.manifest(each[1].repository, each[1].tag) is None]
    if missing:
        ensure_tools(["buildah"], progress)
        with _store(progress) as buildah:
            for target, image in sorted(missing, key=lambda each: TARGETS.index(each[0])):
                _build_and_push(buildah, target, image, chosen, progress)
    return images


def listed(images: Images) -> tuple[ImageLayers, ...]:
    """Their layers, with sizes as far as store and registry know them."""
    with _store(None) as buildah:
        return tuple(_layers(buildah, image) for image in images.by_target().values())


def _layers(buildah: Buildah, image: Image) -> ImageLayers:
    manifest = _registry(image.registry).manifest(image.repository, image.tag)
    local = _local(image)
    layers = layers_of(buildah.description(local), buildah.unpacked_sizes(), manifest) if buildah.has(local) else ()
    return ImageLayers(reference=image.reference, layers=layers)


def _build_and_push(buildah: Buildah, target: str, image: Image, options: BuildOptions, progress: Progress) -> None:
    local = _local(image)
    if not buildah.has(local):
        _build(buildah, target, local, options, progress)
    started = time.monotonic()
    progress.say(f"==> pushing {image.reference}")
    buildah.push(local, image.reference, plain_http=_is_plain(image.registry), progress=progress)
    progress.say(f"    pushed in {minutes_and_seconds(time.monotonic() - started)}")


def _build(buildah: Buildah, target: str, local: str, options: BuildOptions, progress: Progress) -> None:
    ensure_base(buildah, options.base_image, progress)
    started = time.monotonic()
    progress.say(f"==> building {local} (the engine's first time downloads and unpacks torch: minutes)")
    buildah.build(
        CONTEXT,
        image=local,
        target=target,
        arguments=options.arguments,
        volumes=_volumes(options),
        progress=progress,
    )
    check_promises(buildah, local, program=f"quire-{target}", compiler=bool(options.compiler))
    progress.say(f"    built and checked in {minutes_and_seconds(time.monotonic() - started)}")


def _local(image: Image) -> str:
    """What an image is called in the store, whatever registry it goes to."""
    return f"localhost/{image.repository}:{image.tag}"


def _volumes(options: BuildOptions) -> list[str]:
    """The machine's certificates, and uv's cache: what `make setup` has downloaded is not downloaded again.

    Both cover folders that are in the base image or mounted over by the Dockerfile, so that they leave no trace.
    """
    base = os.environ.get("UV_CACHE_DIR") or Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "uv"
    downloads = Path(base).absolute()
    downloads.mkdir(parents=True, exist_ok=True)
    volumes = [f"{downloads}:/var/cache/uv"]
    if Path("/etc/ssl/certs").is_dir():
        volumes.append("/etc/ssl/certs:/etc/ssl/certs:ro")
    if options.torch_wheel is not None:
        volumes.append(f"{options.torch_wheel.parent}:{WHEEL_FOLDER}:ro")
    return volumes


def _registry(address: str) -> Registry:
    return Registry(address=address, plain_http=_is_plain(address))


def _is_plain(address: str) -> bool:
    """Without TLS on this machine only: loopback, and the test cluster's bridge."""
    return address.partition(":")[0] in ("localhost", "127.0.0.1", "10.77.0.1")


@contextmanager
def _store(progress: Progress | None) -> Iterator[Buildah]:
    """The store, for one run at a time; the kernel lets go of the lock however this process ends."""
    home = cache_folder() / "images"
    home.mkdir(parents=True, exist_ok=True)
    with (home / "lock").open("w") as held:
        try:
            fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if progress is not None:
                progress.say("==> another process builds the images; waiting for it")
            fcntl.flock(held, fcntl.LOCK_EX)
        yield Buildah(home / "storage")
