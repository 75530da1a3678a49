"""The shape of a model, which the runner and the cache need for native and transformers models. Needs no torch."""

from dataclasses import dataclass, replace
from typing import TypeVar

from quire_common.model_memory import Windows


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerHeads:
    heads: int
    """The number of query heads."""
    kv_heads: int
    head_dim: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape:
    architecture: str
    vocab_size: int
    max_position_embeddings: int
    eos_token_ids: tuple[int, ...]
    num_layers: int
    """The number of layers with attention: each has a KV cache."""
    num_heads: int
    """The number of query heads, those of the widest layer if they differ."""
    num_kv_heads: int
    """With ``head_dim``, those of the layer whose KV cache is the largest."""
    head_dim: int
    hidden_size: int
    intermediate_size: int
    """The size of a feed-forward layer, or of one expert if there are several."""
    windows: Windows
    chunked: bool = False
    """True if windows do not slide: a query sees the tokens of its own chunk of this many positions, up to itself."""
    all_groups: Windows = ()
    """The ``kv_groups`` of the whole model if this is the shape of some of its layers, else empty."""
    uneven_heads: tuple[LayerHeads, ...] = ()
    """The heads of each layer if layers differ in them, else empty."""

    @property
    def layer_heads(self) -> tuple[LayerHeads, ...]:
        alike = LayerHeads(heads=self.num_heads, kv_heads=self.num_kv_heads, head_dim=self.head_dim)
        return self.uneven_heads or (alike,) * self.num_layers

    @property
    def kv_groups(self) -> Windows:
        """The windows that occur, in the layers' order: layers with the same one share block tables."""
        return self.all_groups or tuple(dict.fromkeys(self.windows))


AnyShape = TypeVar("AnyShape", bound=ModelShape)


def without_idle_windows(shape: AnyShape, longest: int) -> AnyShape:
    """Return the shape without windows that are at least as long as the longest sequence, which hide nothing."""
    return replace(
        shape,
        windows=tuple(window if window is not None and window < longest else None for window in shape.windows),
    )
