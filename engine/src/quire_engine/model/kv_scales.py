"""The scales of a float8 KV cache that a checkpoint may contain: of the keys and the values of each layer.

A number is stored as float8 after division by its scale. Without scales in the checkpoint they are 1. A checkpoint
that is quantized only in its KV cache says so in ``quantization_config`` (compressed-tensors: ``kv_cache_scheme``
without ``config_groups``).
"""

import math
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor

from quire_engine.errors import ModelFolderError
from quire_kernels.kv_cache import FP8, KVCache

_SCALE = re.compile(r"model\.layers\.(\d+)\.self_attn\.(?:([kv])_proj\.)?([kv])_scale")


class ReadSource(Protocol):
    """The part of a source of tensors that this module reads."""

    def read(self, name: str, /) -> Tensor: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class KVScales:
    key: float
    value: float


def is_kv_scale(name: str) -> bool:
    """Return whether a tensor is the scale of a layer's keys or values."""
    return _place(name) is not None


def _place(name: str) -> tuple[int, str] | None:
    found = _SCALE.fullmatch(name)
    if found is None or (found[2] is not None and found[2] != found[3]):
        return None
    return int(found[1]), found[3]


def only_quantizes_kv_cache(quantization: Any) -> bool:
    """Return whether a ``quantization_config`` leaves the weights unquantized, and gives a float8 KV cache scales."""
    if not isinstance(quantization, Mapping) or quantization.get("quant_method") != "compressed-tensors":
        return False
    scheme = quantization.get("kv_cache_scheme")
    return (
        not quantization.get("config_groups")
        and isinstance(scheme, Mapping)
        and scheme.get("num_bits") == 8
        and scheme.get("type") == "float"
        and not scheme.get("dynamic")
    )


def read_kv_scales(names: Collection[str], source: ReadSource, layers: range) -> tuple[KVScales, ...]:
    """Return the scales of these layers, or nothing if the checkpoint has none.

    Raise ModelFolderError for scales that are not one positive number for the keys and values of every layer.
    """
    places = {place: name for name in names if (place := _place(name)) is not None}
    if not places:
        return ()
    scales = []
    for layer in layers:
        pair = []
        for kind in "kv":
            name = places.get((layer, kind))
            if name is None:
                missing = f"model.layers.{layer}.self_attn.{kind}_scale"
                raise ModelFolderError(f"tensor {missing} is missing; others have scales of the KV cache")
            pair.append(_positive(name, source.read(name)))
        scales.append(KVScales(key=pair[0], value=pair[1]))
    return tuple(scales)


def _positive(name: str, tensor: Tensor) -> float:
    if tensor.numel() != 1:
        raise ModelFolderError(f"tensor {name} has shape {list(tensor.shape)}; one scale for all heads is supported")
    scale = float(tensor)
    if not (math.isfinite(scale) and scale > 0.0):
        raise ModelFolderError(f"tensor {name} is {scale:g}; a scale is above 0")
    return scale


def scales_in_words(scales: tuple[KVScales, ...]) -> str:
    return "the scales of the checkpoint" if scales else "a scale of 1: values beyond 448 are clipped"


def set_kv_scales(caches: tuple[KVCache, ...], scales: tuple[KVScales, ...]) -> None:
    """Set the scales of the caches that are float8; other caches store numbers unchanged."""
    for cache, scale in zip(caches, scales, strict=False):  # no scales: those of the allocation remain
        if cache.keys.dtype == FP8:
            assert cache.key_scale is not None and cache.value_scale is not None
            cache.key_scale.fill_(scale.key)
            cache.value_scale.fill_(scale.value)
