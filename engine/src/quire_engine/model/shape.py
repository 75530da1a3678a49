"""What the runner and the cache need to know of a model, whoever computes its layers. Needs no torch."""

from dataclasses import dataclass, replace
from typing import TypeVar

Windows = tuple[int | None, ...]
"""By layer, the tokens a query may look back on, itself included; None is all of them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape:
    architecture: str
    vocab_size: int
    max_position_embeddings: int
    eos_token_ids: tuple[int, ...]
    num_layers: int
    """Those with attention: each has a KV cache."""
    num_heads: int
    """Query heads of a layer, of the widest where they differ."""
    num_kv_heads: int
    head_dim: int
    hidden_size: int
    intermediate_size: int
    """Of a feed-forward layer; of one expert where there are several."""
    windows: Windows

    @property
    def kv_groups(self) -> Windows:
        """The windows that occur, in the layers' order: layers with the same one share block tables."""
        return tuple(dict.fromkeys(self.windows))


AnyShape = TypeVar("AnyShape", bound=ModelShape)


def without_idle_windows(shape: AnyShape, longest: int) -> AnyShape:
    """A window no shorter than the longest sequence hides nothing: its layers are as those with full attention."""
    return replace(
        shape,
        windows=tuple(window if window is not None and window < longest else None for window in shape.windows),
    )
