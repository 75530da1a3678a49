"""The layers native families are built from, over the kernels: a decoder stack as plain objects, no nn.Module.

A family's builder makes them from weights; ``DecoderStack`` runs them. All that a step needs comes in as
``ModelInputs``: no layer reads a global.

Legend: T tokens, R rows of logits, H hidden size, HQ/HK query/KV heads, D head dim, DR its rotated part, P positions,
V vocabulary.
"""

from dataclasses import dataclass

from torch import Tensor
from torch.nn import functional

from quire_engine.model.linear import Linear
from quire_kernels.activation import silu_and_mul
from quire_kernels.kv_cache import KVCache
from quire_kernels.paged_attention import AttentionPlan, paged_attention
from quire_kernels.rms_norm import rms_norm
from quire_kernels.store_kv import store_kv


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupInputs:
    """What the layers of one KV cache group share in a step."""

    slots: Tensor  # [T] int64
    plan: AttentionPlan


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelInputs:
    token_ids: Tensor  # [T] int64
    positions: Tensor  # [T] int64
    groups: tuple[GroupInputs, ...]
    logits_rows: Tensor  # [R] int64: the tokens whose successors will be drawn


@dataclass(frozen=True, slots=True, kw_only=True)
class Norm:
    weight: Tensor  # [H]
    eps: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Attention:
    """Grouped-query attention with rotary positions."""

    qkv: Linear  # H to (HQ + 2 HK) D
    out: Linear  # HQ D to H
    heads: int
    kv_heads: int
    head_dim: int
    cos_sin: Tensor  # [P, DR]
    q_norm: Norm | None
    k_norm: Norm | None
    group: int

    def __call__(self, x: Tensor, inputs: ModelInputs, cache: KVCache) -> Tensor:
        group = inputs.groups[self.group]
        projected = self.qkv(x).view(x.shape[0], -1, self.head_dim)  # [T, HQ + 2 HK, D]
        q, k, v = projected.split((self.heads, self.kv_heads, self.kv_heads), dim=1)
        q, k = _normalise_heads(q, self.q_norm), _normalise_heads(k, self.k_norm)
        store_kv(q, k, v, self.cos_sin, inputs.positions, group.slots, cache)
        attended = paged_attention(q, cache, group.plan, self.head_dim**-0.5)  # [T, HQ, D]
        return self.out(attended.view(x.shape[0], -1))


@dataclass(frozen=True, slots=True, kw_only=True)
class GatedMlp:
    gate_up: Linear  # H to 2 I
    down: Linear  # I to H

    def __call__(self, x: Tensor) -> Tensor:
        return self.down(silu_and_mul(self.gate_up(x)))


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderLayer:
    attention_norm: Norm
    attention: Attention
    mlp_norm: Norm
    mlp: GatedMlp


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderStack:
    """A pre-norm decoder. The residual stream is added to inside each norm, so it is read and written once."""

    embedding: Tensor  # [V, H]
    layers: tuple[DecoderLayer, ...]
    norm: Norm
    lm_head: Linear  # H to V

    def __call__(self, inputs: ModelInputs, caches: tuple[KVCache, ...]) -> Tensor:
        """Logits [R, V] of ``inputs.logits_rows``; ``caches`` has one per layer."""
        residual = functional.embedding(inputs.token_ids, self.embedding)  # [T, H]
        addend: Tensor | None = None
        for layer, cache in zip(self.layers, caches, strict=True):
            x = _normalise(addend, residual, layer.attention_norm)
            addend = layer.attention(x, inputs, cache)
            x = _normalise(addend, residual, layer.mlp_norm)
            addend = layer.mlp(x)
        rows = inputs.logits_rows
        if rows.shape[0] == 0:
            return residual.new_empty((0, self.embedding.shape[0]))
        # Only rows that are sampled go through the LM head, which is a fifth of a small model's work.
        if addend is not None and rows.shape[0] != residual.shape[0]:
            addend, residual = addend.index_select(0, rows), residual.index_select(0, rows)
        return self.lm_head(_normalise(addend, residual, self.norm))


def _normalise_heads(x: Tensor, norm: Norm | None) -> Tensor:
    """[T, heads, D], each head by itself."""
    return x if norm is None else rms_norm(x.reshape(-1, x.shape[2]), norm.weight, norm.eps).view(x.shape)


def _normalise(addend: Tensor | None, residual: Tensor, norm: Norm) -> Tensor:
    """Adds to the residual stream in place, and normalises it."""
    if addend is None:
        return rms_norm(residual, norm.weight, norm.eps)
    return rms_norm(addend, norm.weight, norm.eps, residual)
