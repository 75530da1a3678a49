"""A table of images and their layers with sizes and origins. Pure.

Layers that only set metadata (ENV, USER, LABEL) have no size and are omitted.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

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
