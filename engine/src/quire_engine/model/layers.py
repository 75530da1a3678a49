"""The layers of native families, based on the kernels: a decoder stack as plain objects, without nn.Module.

A family's builder creates them from weights; ``DecoderStack`` runs them. ``ModelInputs`` contains everything that a
step needs: no layer reads a global.

Legend: T tokens, R rows of logits, H hidden size, HQ/HK query/KV heads, D head dim, DR its rotated part, P positions, V
vocabulary.
"""

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
from torch import Tensor

from quire_engine.model.linear import Fp8Linear, Linear, is_packed
from quire_engine.model.recordings import Recordings
from quire_kernels.activation import (
    gelu_tanh_and_mul,
    gelu_tanh_and_mul_fp8,
    silu_and_mul,
    silu_and_mul_fp8,
)
from quire_kernels.dispatch import runs_triton
from quire_kernels.embedding import embed
from quire_kernels.fp8 import Fp8Rows
from quire_kernels.kv_cache import KVCache
from quire_kernels.lora import LayerSlots, TokenGroups, add_adapters
from quire_kernels.moe import Routes, apply_experts, fused_experts, route_tokens
from quire_kernels.paged_attention import AttentionPlan, paged_attention
from quire_kernels.rms_norm import rms_norm, rms_norm_fp8
from quire_kernels.store_kv import store_kv


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupInputs:
    """The inputs that the layers of one KV cache group share in a step."""

    slots: Tensor  # [T] int64
    plan: AttentionPlan


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelInputs:
    token_ids: Tensor  # [T] int64
    positions: Tensor  # [T] int64
    groups: tuple[GroupInputs, ...]
    logits_rows: Tensor
    """[R] int64, ascending: the tokens whose successors are sampled or reported. As many as tokens are all of them; a
    model may then leave the values unread."""
    adapters: TokenGroups | None = None
    """The tokens that have an adapter; None if none has one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AdaptedLinear:
    """A linear layer with slots for adapters; a call alone computes the layer without them."""

    base: Linear
    slots: LayerSlots

    def __call__(self, x: Tensor) -> Tensor:
        return self.base(x)


MOST_RECORDED_TOKENS = 64
"""Larger steps seldom repeat a number of rows, and preparing their launches takes little of their time."""

Activations = Tensor | Fp8Rows
"""Rows that enter a linear layer; quantized already only for an ``Fp8Linear`` that has no adapters."""


def project(linear: Linear, x: Activations, adapters: TokenGroups | None) -> Tensor:
    """Return the layer's output [T, N] for ``x`` [T, K], with what each token's adapter adds.

    The caller quantizes rows only for an ``Fp8Linear``; checking it here would cost time in every layer of a step.
    """
    y = linear(x)  # type: ignore[arg-type]
    if adapters is not None and isinstance(linear, AdaptedLinear):
        assert isinstance(x, Tensor), "layers with adapters get rows that are not quantized"
        add_adapters(y, x, linear.slots, adapters)
    return y


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
    scale: float
    soft_cap: float | None

    def __call__(self, x: Activations, inputs: ModelInputs, cache: KVCache, rows: Tensor | None) -> Tensor:
        """Store the keys and values of all tokens, and return the output of ``rows``, or of all tokens."""
        group = inputs.groups[self.group]
        q = self.store(x, inputs, cache)
        attended = paged_attention(q, cache, group.plan, self.scale, self.soft_cap)  # [T, HQ, D]
        attended = attended.view(attended.shape[0], -1)
        return project(self.out, attended if rows is None else attended.index_select(0, rows), inputs.adapters)

    def store(self, x: Activations, inputs: ModelInputs, cache: KVCache) -> Tensor:
        """Store the keys and values of all tokens, and return their queries [T, HQ, D]."""
        projected = project(self.qkv, x, inputs.adapters)
        projected = projected.view(projected.shape[0], -1, self.head_dim)  # [T, HQ + 2 HK, D]
        q, k, v = projected.split((self.heads, self.kv_heads, self.kv_heads), dim=1)
        slots = inputs.groups[self.group].slots
        store_kv(q, k, v, self.cos_sin, inputs.positions, slots, cache, self.q_norm, self.k_norm)
        return q


@dataclass(frozen=True, slots=True, kw_only=True)
class GatedMlp:
    gate_up: Linear  # H to 2 I
    down: Linear  # I to H
    gelu: bool
    """The gate uses gelu, else silu."""

    def __call__(self, x: Activations, adapters: TokenGroups | None = None) -> Tensor:
        gate_up = project(self.gate_up, x, adapters)
        if isinstance(self.down, Fp8Linear):
            return self.down(gelu_tanh_and_mul_fp8(gate_up) if self.gelu else silu_and_mul_fp8(gate_up))
        return project(self.down, gelu_tanh_and_mul(gate_up) if self.gelu else silu_and_mul(gate_up), adapters)


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedExperts:
    """Experts with separate packed weights for the CPU, called one after the other."""

    experts: tuple[GatedMlp, ...]

    def __call__(self, x: Tensor, routes: Routes) -> Tensor:
        return apply_experts(x, routes, self.experts)


@dataclass(frozen=True, slots=True, kw_only=True)
class StackedExperts:
    """The weights of all experts in two tensors; a device reads the parts that its tokens need."""

    gate_up: Tensor  # [E, 2 I, H]
    down: Tensor  # [E, H, I]
    gelu: bool
    deterministic: bool = False
    """True if a token's result must have the same bits whatever the number of tokens."""

    def __call__(self, x: Tensor, routes: Routes) -> Tensor:
        return fused_experts(x, routes, self.gate_up, self.down, gelu=self.gelu, deterministic=self.deterministic)


@dataclass(frozen=True, slots=True, kw_only=True)
class SparseMlp:
    """Several feed-forward layers, the experts; each token is routed to a few of them."""

    router: Linear  # H to the number of experts
    experts: Callable[[Tensor, Routes], Tensor]
    """``PackedExperts``, ``StackedExperts``, or the experts of one rank's part of the model."""
    per_token: int
    normalise: bool
    """True if the weights of a token's experts are scaled to a sum of 1."""

    def __call__(self, x: Activations, adapters: TokenGroups | None = None) -> Tensor:
        """Return the output [T, H]; experts have no adapters, so ``adapters`` changes nothing."""
        assert isinstance(x, Tensor), "experts are not in fp8"
        routes = route_tokens(self.router(x), self.per_token, normalise=self.normalise)
        return self.experts(x, routes)


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderLayer:
    """A decoder layer. The ``out`` norms, if a family has them, apply before the addition to the residual stream."""

    attention_norm: Norm
    attention: Attention
    attention_out_norm: Norm | None
    mlp_norm: Norm
    mlp: GatedMlp | SparseMlp
    mlp_out_norm: Norm | None
    can_be_recorded: bool = field(init=False)
    """True if without adapters only launches on a CPU read or write the layer's tensors."""

    def __post_init__(self) -> None:
        linears: tuple[Linear, ...] = (self.attention.qkv, self.attention.out)
        if isinstance(self.mlp, GatedMlp):
            linears += (self.mlp.gate_up, self.mlp.down)
        packed = all(is_packed(layer.base if isinstance(layer, AdaptedLinear) else layer) for layer in linears)
        object.__setattr__(self, "can_be_recorded", packed and isinstance(self.mlp, GatedMlp))


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderStack:
    """A pre-norm decoder. Each norm also adds to the residual stream, which is therefore read and written once."""

    embedding: Tensor  # [V, H]
    layers: tuple[DecoderLayer, ...]
    norm: Norm
    lm_head: Linear | None  # H to V; None where only hidden states are read
    embedding_scale: float | None
    logit_soft_cap: float | None
    recordings: Recordings = field(init=False, repr=False, compare=False, default_factory=Recordings)
    has_packed_head: bool = field(init=False, repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "has_packed_head", self.lm_head is not None and is_packed(self.lm_head))

    def __call__(self, inputs: ModelInputs, caches: tuple[KVCache, ...]) -> Tensor:
        """Return the logits [R, V] of ``inputs.logits_rows``; ``caches`` has one cache per layer.

        The next call may overwrite them.
        """
        if self.records_logits(inputs):
            logits = self.recordings.run("logits", self._logits, inputs.token_ids, inputs, caches)
            return self._capped(logits)
        # Only rows that are sampled go through the LM head, which is a fifth of a small model's work.
        return self.logits(self.hidden_states(inputs, caches))

    def records_logits(self, inputs: ModelInputs) -> bool:
        """Return whether a step is recorded from its tokens to its logits: those of every token."""
        return self.has_packed_head and rows_with_logits(inputs) is None and can_record(self.layers, inputs)

    def guess(self, inputs: ModelInputs, slots: np.ndarray, caches: tuple[KVCache, ...]) -> np.ndarray:
        """Return the most probable tokens [P, R] of passes that each go on with those of the one before.

        See ``Recordings.guess``. Only for ``inputs`` of one token per sequence that the model ``records_logits`` of. A
        cap of the logits changes no guess.
        """
        return self.recordings.guess(self._logits, inputs, slots, caches)

    def record(self, inputs: ModelInputs, caches: tuple[KVCache, ...]) -> None:
        """Record the step of as many tokens as ``inputs`` have, if it ``records_logits``, without running it."""
        if self.records_logits(inputs):
            self.recordings.prepare("logits", self._logits, inputs.token_ids, inputs, caches)

    def record_guesses(self, inputs: ModelInputs, caches: tuple[KVCache, ...]) -> None:
        """Record the passes of ``guess`` in the same way."""
        if self.records_logits(inputs):
            self.recordings.prepare_guesses(self._logits, inputs, caches)

    def _logits(
        self, source: Tensor, inputs: ModelInputs, caches: tuple[KVCache, ...], begin_layer: Callable[[], None]
    ) -> Tensor:
        """Return the logits [T, V] of tokens ``source`` [T], as a ``Body``."""
        assert self.lm_head is not None
        # Memory of its own: results of launches would be overwritten by later layers.
        residual = self.embedding.new_empty((source.shape[0], self.embedding.shape[1]))
        embed(source, self.embedding, self.embedding_scale, out=residual)
        addend = _run_all(self.layers, residual, inputs, caches, begin_layer)
        return self.lm_head(normalise(addend, residual, self.norm))

    def logits(self, hidden: Tensor) -> Tensor:
        """Return the logits [R, V] of normalized hidden states [R, H]."""
        assert self.lm_head is not None, "this model was built without its LM head"
        if not hidden.shape[0]:
            return hidden.new_empty((0, self.embedding.shape[0]))
        return self._capped(self.lm_head(hidden))

    def _capped(self, logits: Tensor) -> Tensor:
        return logits if self.logit_soft_cap is None else cap(logits, self.logit_soft_cap)

    def hidden_states(self, inputs: ModelInputs, caches: tuple[KVCache, ...]) -> Tensor:
        """Return the hidden states [R, H] of ``inputs.logits_rows`` after the last norm."""
        residual = embed(inputs.token_ids, self.embedding, self.embedding_scale)  # [T, H]
        addend, residual = run_layers(self.layers, residual, inputs, caches, self.recordings, rows_with_logits(inputs))
        return normalise(addend, residual, self.norm) if residual.shape[0] else residual


def rows_with_logits(inputs: ModelInputs) -> Tensor | None:
    """Return ``inputs.logits_rows``, or None if every token has logits."""
    rows = inputs.logits_rows
    return None if rows.shape[0] == inputs.token_ids.shape[0] else rows


def run_layers(
    layers: tuple[DecoderLayer, ...],
    residual: Tensor,
    inputs: ModelInputs,
    caches: tuple[KVCache, ...],
    recordings: Recordings,
    rows: Tensor | None = None,
) -> tuple[Tensor | None, Tensor]:
    """Run layers on ``residual`` [T, H]; return what must still be added to the residual stream, and the stream.

    The next call with the same ``recordings`` may overwrite both.

    rows  the rows [R] of both that are returned; None for all
    """
    if can_record(layers, inputs):

        def body(
            source: Tensor, inputs: ModelInputs, caches: tuple[KVCache, ...], begin_layer: Callable[[], None]
        ) -> tuple[Tensor | None, Tensor]:
            return _run_all(layers, source, inputs, caches, begin_layer), source

        addend, residual = recordings.run("layers", body, residual, inputs, caches)
    elif rows is None or inputs.adapters is not None:
        addend = _run_all(layers, residual, inputs, caches)
    else:
        # Of tokens without a result, the last layer computes nothing but keys and values.
        addend = _run_all(layers[:-1], residual, inputs, caches[:-1])
        return _run_last(layers[-1], addend, residual, inputs, caches[-1], rows)
    if rows is None:
        return addend, residual
    return (None if addend is None else addend.index_select(0, rows)), residual.index_select(0, rows)


def can_record(layers: tuple[DecoderLayer, ...], inputs: ModelInputs) -> bool:
    """Return whether the launches of a step's layers are recorded."""
    tokens = inputs.token_ids
    return (
        tokens.shape[0] <= MOST_RECORDED_TOKENS
        and inputs.adapters is None
        and not runs_triton(tokens.device.type)  # interpreted kernels run at once
        and all(layer.can_be_recorded for layer in layers)
    )


def _run_all(
    layers: tuple[DecoderLayer, ...],
    residual: Tensor,
    inputs: ModelInputs,
    caches: tuple[KVCache, ...],
    begin_layer: Callable[[], None] = lambda: None,
) -> Tensor | None:
    """Run layers: change ``residual``, and return what remains to be added to it."""
    addend: Tensor | None = None
    for layer, cache in zip(layers, caches, strict=True):
        begin_layer()
        attended = layer.attention(_attention_input(layer, addend, residual), inputs, cache, None)
        addend = _feed_forward(layer, attended, residual, inputs)
    return addend


def _run_last(
    layer: DecoderLayer, addend: Tensor | None, residual: Tensor, inputs: ModelInputs, cache: KVCache, rows: Tensor
) -> tuple[Tensor | None, Tensor]:
    """Run the last layer for ``rows``: return what remains to be added, and the residual stream, both [R, H]."""
    x = _attention_input(layer, addend, residual)
    if rows.shape[0] == 0:
        layer.attention.store(x, inputs, cache)
        return None, residual[:0]
    attended = layer.attention(x, inputs, cache, rows)
    residual = residual.index_select(0, rows)
    return _feed_forward(layer, attended, residual, inputs), residual


def _attention_input(layer: DecoderLayer, addend: Tensor | None, residual: Tensor) -> Activations:
    return _normalise_for(layer.attention.qkv, addend, residual, layer.attention_norm)


def _feed_forward(layer: DecoderLayer, attended: Tensor, residual: Tensor, inputs: ModelInputs) -> Tensor:
    attended = _normalise_output(attended, layer.attention_out_norm)
    reader = layer.mlp.gate_up if isinstance(layer.mlp, GatedMlp) else layer.mlp.router
    x = _normalise_for(reader, attended, residual, layer.mlp_norm)
    return _normalise_output(layer.mlp(x, inputs.adapters), layer.mlp_out_norm)


def _normalise_output(x: Tensor, norm: Norm | None) -> Tensor:
    return x if norm is None else rms_norm(x, norm.weight, norm.eps)


def cap(logits: Tensor, soft_cap: float) -> Tensor:
    """Return soft_cap * tanh(logits / soft_cap), in place."""
    return logits.div_(soft_cap).tanh_().mul_(soft_cap)


def _normalise_for(reader: Linear, addend: Tensor | None, residual: Tensor, norm: Norm) -> Activations:
    """Return what ``normalise`` does, quantized if the linear layer that reads it takes fp8."""
    if not isinstance(reader, Fp8Linear):
        return normalise(addend, residual, norm)
    if addend is None:
        return rms_norm_fp8(residual, norm.weight, norm.eps)
    return rms_norm_fp8(addend, norm.weight, norm.eps, residual)


def normalise(addend: Tensor | None, residual: Tensor, norm: Norm) -> Tensor:
    """Add to the residual stream in place, and normalize it."""
    if addend is None:
        return rms_norm(residual, norm.weight, norm.eps)
    return rms_norm(addend, norm.weight, norm.eps, residual)
