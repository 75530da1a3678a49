"""A native model without weights: for a stand-in for a GPU's driver, which launches kernels and runs none of them.

Its layers are those that the family's builder creates, on CPU tensors. A weight has a shape and no memory; a linear
layer returns memory of the right shape with any content, unless another backend is given, whose products then see
weights without memory. Norms, tables of rotations and the weights of experts do have
memory, because kernels get their addresses; so do the weights of ``launches_few_rows``.
"""

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from quire_engine.model.config import ModelConfig
from quire_engine.model.decoder import find_family
from quire_engine.model.layers import DecoderStack
from quire_engine.model.linear import Linear, LinearBackend

_MATRIX = 2
_EMBEDDING, _ROUTER = "model.embed_tokens.weight", "gate.weight"


def build_weightless(
    config: ModelConfig, dtype: torch.dtype, positions: int, backend: LinearBackend | None = None
) -> DecoderStack:
    """Return the model of ``config`` for sequences of up to ``positions`` tokens."""
    # A head of its own, because the embedding here has one row only.
    config = replace(config, tie_word_embeddings=False)
    family = find_family(config.architecture)
    read = _Read(shapes=family.tensor_shapes(config, ()), dtype=dtype)
    model = family.build(config, read, backend or _Backend(dtype), positions, None)
    assert isinstance(model, DecoderStack)
    return replace(model, embedding=model.embedding.expand(config.vocab_size, config.hidden_size))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Read:
    """The checkpoint of the model."""

    shapes: Mapping[str, tuple[int, ...]]
    dtype: torch.dtype

    @property
    def names(self) -> Collection[str]:
        return self.shapes.keys()

    def __call__(self, name: str, part: int | None = None) -> Tensor:
        shape = self.shapes[name]
        if name == _EMBEDDING:
            shape = (1, shape[1])
        if part is not None:
            shape = shape[1:]
        is_linear = len(shape) == _MATRIX and name != _EMBEDDING and ".experts." not in name
        return torch.empty(shape, dtype=self.dtype, device="meta" if is_linear and _ROUTER not in name else "cpu")


class _Backend:
    """A backend whose layers compute nothing."""

    copies = False
    weights = name = "none"

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype, self.bytes_per_weight = dtype, dtype.itemsize

    def pack(self, weight: Tensor, bias: Tensor | None, *, precise: bool = False) -> Linear:
        outputs, dtype = weight.shape[0], self.dtype
        layer: Callable[[Tensor], Tensor] = lambda x: torch.empty((x.shape[0], outputs), dtype=dtype)  # noqa: E731
        return layer
