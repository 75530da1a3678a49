"""The images of a checkout: built, inspected and pushed where they are missing, and the command `cluster.py images`.

It prints the layers of each with their sizes and origins.
"""

import json
import os
import re
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from quire_cluster.errors import ImageBuildFailed
from quire_cluster.images.base_image import ensure_base
from quire_cluster.images.buildah import Buildah, make_room, store
from quire_cluster.images.inputs import (
    CACHE_FOLDER,
    DOCKERFILE,
    TARGETS,
    WHEEL_FOLDER,
    BuildOptions,
    Image,
    Images,
    copy_context,
    fingerprint,
    parse,
)
from quire_cluster.images.promises import check_promises
from quire_cluster.images.registry import OWN, Registry
from quire_cluster.progress import Progress, minutes_and_seconds

_WIDTH: Final = 86


@dataclass(frozen=True, slots=True, kw_only=True)
class Layer:
    made_by: str
    unpacked: int
    compressed: int | None  # None: not in a registry


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageLayers:
    reference: str
    layers: tuple[Layer, ...]


def layers_of(
    description: Mapping[str, Any], unpacked: Mapping[str, int], manifest: Mapping[str, Any] | None
) -> tuple[Layer, ...]:
    """Return the layers from an image's configuration, the sizes by digest, and the registry's manifest."""
    digests: Sequence[str] = description["rootfs"]["diff_ids"]
    steps = [entry.get("created_by", "") for entry in description["history"] if not entry.get("empty_layer", False)]
    sizes = [None] * len(digests) if manifest is None else [layer["size"] for layer in manifest["layers"]]
    return tuple(
        Layer(made_by=instruction(step), unpacked=unpacked.get(digest, 0), compressed=size)
        for step, digest, size in zip(steps, digests, sizes, strict=True)
    )


def instruction(created_by: str) -> str:
    """Return the line of the Dockerfile from the builder's history."""
    text = re.sub(r"\s+", " ", created_by).strip()
    text = re.sub(r"^(\|\d+ (\S+=.*? )?)?/bin/sh -c (#\(nop\) )?", "", text)
    text = re.sub(r"^(RUN )?(--mount=\S+ )+", "", text)
    text = re.sub(r"\b(file|dir|multi):[0-9a-f]{64}", r"\1", text)
    return text


def table(images: Iterable[ImageLayers]) -> str:
    lines = []
    for image in images:
        lines += [f"{image.reference}", f"  {'unpacked':>10} {'compressed':>10}  made by"]
        lines += [_row(layer.unpacked, layer.compressed, layer.made_by) for layer in image.layers]
        pushed = [layer.compressed for layer in image.layers if layer.compressed is not None]
        compressed = sum(pushed) if len(pushed) == len(image.layers) else None
        lines += [_row(sum(layer.unpacked for layer in image.layers), compressed, "in all"), ""]
    return "\n".join(lines)


def _row(unpacked: int, compressed: int | None, text: str) -> str:
    cut = text if len(text) <= _WIDTH else f"{text[: _WIDTH - 1]}…"
    return f"  {megabytes(unpacked):>10} {'' if compressed is None else megabytes(compressed):>10}  {cut}"


def megabytes(size: int) -> str:
    if size >= 1e9:
        return f"{size / 1e9:.2f} GB"
    if size >= 1e6:
        return f"{size / 1e6:.1f} MB"
    return f"{size / 1e3:.0f} kB"


CONTEXT: Final = Path(__file__).parents[4]
LOCAL: Final = "localhost"  # what stands in the place of a registry in the store


def images_of(registry: str, options: BuildOptions, context: Path) -> Images:
    """Return the images of a checkout without building them."""
    dockerfile = parse((context / DOCKERFILE).read_text())
    tags = {target: fingerprint(context, dockerfile, target, options.arguments) for target in TARGETS}
    return Images(
        **{target: Image(registry=registry, repository=f"quire-{target}", tag=tags[target]) for target in tags}
    )


def ensure_images(registry: str, progress: Progress) -> Images:
    """Provide all three images in the registry. Raise ClusterError with a solution."""
    options = BuildOptions.from_environment(os.environ)
    images = images_of(registry, options, CONTEXT)
    if not _missing(images):
        return images
    with store(progress) as buildah, _copied_context(buildah) as context:
        images = images_of(registry, options, context)
        missing = _missing(images)
        _build(buildah, context, missing, options, progress)
        for target in missing:
            image = images.by_target()[target]
            push(buildah, image, image.reference, progress)
    return images


def build_images(progress: Progress) -> Images:
    """Provide all three images in the store, with the names that `buildah images` shows."""
    options = BuildOptions.from_environment(os.environ)
    with store(progress) as buildah, _copied_context(buildah) as context:
        return _build(buildah, context, TARGETS, options, progress)


def push(buildah: Buildah, image: Image, destination: str, progress: Progress) -> None:
    started = time.monotonic()
    progress.say(f"==> pushing {destination}")
    registry = Registry(address=image.registry)
    buildah.push(_in_store(image), destination, plain_http=registry.plain_http, progress=progress)
    progress.say(f"    pushed in {minutes_and_seconds(time.monotonic() - started)}")


def listed(images: Images) -> tuple[ImageLayers, ...]:
    """Return their layers, with the sizes that store and registry know."""
    with store(None) as buildah:
        sizes = buildah.unpacked_sizes()
        return tuple(_layers(buildah, image, sizes) for image in images.by_target().values())


def _layers(buildah: Buildah, image: Image, sizes: Mapping[str, int]) -> ImageLayers:
    remote = None if image.registry == LOCAL else Registry(address=image.registry)
    manifest = None if remote is None else remote.manifest(image.repository, image.tag)
    if buildah.has(_in_store(image)):
        layers = layers_of(buildah.description(_in_store(image)), sizes, manifest)
    elif remote is not None and manifest is not None:
        layers = layers_of(remote.description(image.repository, manifest), sizes, manifest)
    else:
        layers = ()
    return ImageLayers(reference=image.reference, layers=layers)


def _missing(images: Images) -> tuple[str, ...]:
    """Return the targets that are missing in their registry, fast ones first."""
    named = images.by_target()
    remote = Registry(address=images.engine.registry)
    return tuple(name for name in TARGETS if remote.manifest(named[name].repository, named[name].tag) is None)


@contextmanager
def _copied_context(buildah: Buildah) -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="context-", dir=buildah.scratch) as folder:
        copy_context(CONTEXT, Path(folder))
        yield Path(folder)


def _build(
    buildah: Buildah, context: Path, targets: Iterable[str], options: BuildOptions, progress: Progress
) -> Images:
    """Build the targets that are missing in the store."""
    images = images_of(LOCAL, options, context)
    named = images.by_target()
    missing = [target for target in targets if not buildah.has(named[target].reference)]
    if missing:
        make_room(buildah, progress)
        ensure_base(buildah, options.base_image, progress)
    for target in missing:
        _build_one(buildah, context, target, named[target].reference, options, progress)
    return images


def _build_one(
    buildah: Buildah, context: Path, target: str, name: str, options: BuildOptions, progress: Progress
) -> None:
    started = time.monotonic()
    first = ": minutes where torch is not in the store yet, seconds where it is" if target == "engine" else ""
    progress.say(f"==> building {name}{first}")
    unchecked = f"{name}-unchecked"  # or a run after one that was stopped here would take it for good
    buildah.build(
        context,
        image=unchecked,
        target=target,
        arguments={**options.arguments, "UV_CACHE_DIR": CACHE_FOLDER},
        volumes=_volumes(options),
        progress=progress,
    )
    check_promises(buildah, unchecked, program=f"quire-{target}", compiler=bool(options.compiler))
    buildah.rename(unchecked, name)
    progress.say(f"    built and checked in {minutes_and_seconds(time.monotonic() - started)}")


def _in_store(image: Image) -> str:
    """Return the name of an image in the store, independent of its registry."""
    return Image(registry=LOCAL, repository=image.repository, tag=image.tag).reference


def _volumes(options: BuildOptions) -> list[str]:
    """Return the mounts: the machine's certificates, and uv's cache with the downloads of `make setup`.

    All of them cover folders of the base image, because a folder created for a mount would stay in the image.
    """
    base = os.environ.get("UV_CACHE_DIR") or Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "uv"
    downloads = Path(base).absolute()
    downloads.mkdir(parents=True, exist_ok=True)
    volumes = [f"{downloads}:{CACHE_FOLDER}"]
    if Path("/etc/ssl/certs").is_dir():
        volumes.append("/etc/ssl/certs:/etc/ssl/certs:ro")
    if options.torch_wheel is not None:
        volumes.append(f"{options.torch_wheel.parent}:{WHEEL_FOLDER}:ro")
    return volumes


def images(registry: str | None, tag: str | None, progress: Progress) -> int:
    """Run the command. Without `registry`, it uses the running test cluster's; `tag` is an additional tag."""
    started = time.monotonic()
    destination = registry or (OWN if Registry(address=OWN).answers() else None)
    if destination is None:
        if tag is not None:
            raise ImageBuildFailed(
                "TAG is the images' name in a registry: say which, as in REGISTRY=registry.example/team"
            )
        made = build_images(progress)
    else:
        made = ensure_images(destination, progress)
        if tag is not None:
            _tag(made, tag, progress)
    print(table(listed(made)))
    print(f"\n# Ready after {minutes_and_seconds(time.monotonic() - started)}.", end=" ")
    if destination is None:
        print("Not pushed: the registry of the test cluster does not run (make cluster-up), and REGISTRY is not set.")
    else:
        values = made.chart_values() if tag is None else {"images": {"registry": destination, "tag": tag}}
        print(f"The chart's values for them:\n{json.dumps(values)}")
    return 0


def _tag(made: Images, tag: str, progress: Progress) -> None:
    build_images(progress)  # a registry may have an image that the store no longer has
    with store(progress) as buildah:
        for image in made.by_target().values():
            push(buildah, image, f"{image.registry}/{image.repository}:{tag}", progress)
