"""Initial weights that copy: an induction circuit in the first two layers of a small Llama model.

A model that calls tools copies names and values from its prompt. Small models learn to copy late and suddenly, after
far more steps than the demo's training has, so it begins with what they learn (Olsson et al. 2022, "In-context Learning
and Induction Heads"). Two heads of layer 0 attend to the token before and to the one before that, and write their
embeddings next to the token's own. Heads of layer 1 attend to places that follow the current two tokens, and raise the
logit of what stands there. Training changes all of these weights. Nothing depends on the texts of tokens.

Dimensions of the residual stream: E for a token's embedding, one that is constant, D for each of the two tokens before.
Letters: V vocabulary, H hidden size, D head dim.
"""

import math

import torch
from transformers import LlamaForCausalLM

BEFORE = 2
"""Number of tokens before a place that a copy compares."""
_EMBEDDING_STD = 0.5
_CONSTANT = 2.0
_PREVIOUS_SCALE = 8.0
_MATCH_SCALE = 4.0
_WRITE_SCALE = 2.0
_NORM_WEIGHT = 0.2
_FAST, _SLOW = 0.01, 0.003
"""Rotary frequencies in radians per token: those above tell neighbours apart, those below ignore the distance."""


@torch.no_grad()
def add_induction(model: LlamaForCausalLM, seed: int) -> None:
    """Write the circuit into a new model, whose other weights stay random."""
    generator = torch.Generator().manual_seed(seed)
    hidden = model.config.hidden_size
    content = hidden // 2 - 1  # E
    embedding = model.model.embed_tokens.weight  # [V, H]
    embedding.zero_()
    embedding[:, :content] = _EMBEDDING_STD * torch.randn(len(embedding), content, generator=generator)
    embedding[:, content] = _CONSTANT
    # Logits of the first steps are small, so that wrong copies cost little.
    model.model.norm.weight.fill_(_NORM_WEIGHT)
    size = model.config.head_dim
    projection = torch.randn(size, content, generator=generator) / math.sqrt(content)
    _attend_to_previous(model, projection)
    _attend_to_matches(model, projection, generator)


def _frequencies(model: LlamaForCausalLM) -> torch.Tensor:
    """Return the rotary frequencies, [D / 2]."""
    size = model.config.head_dim
    return model.config.rope_parameters["rope_theta"] ** (-torch.arange(0, size, 2).float() / size)


def _attend_to_previous(model: LlamaForCausalLM, projection: torch.Tensor) -> None:
    """Let head n of layer 0 attend to the token n + 1 places before, and write its projection, [D, E].

    Query and key are the same for all tokens. The query is turned back by the distance, so that the product is largest
    where the key's token is the one at that distance.
    """
    attention = model.model.layers[0].self_attn
    frequencies = _frequencies(model)
    fast = (frequencies > _FAST).float()
    size, content = projection.shape
    group = model.config.num_attention_heads // model.config.num_key_value_heads
    # The norm before the layer scales a row of the embedding to a root mean square of 1.
    rms = math.sqrt((content * _EMBEDDING_STD**2 + _CONSTANT**2) / model.config.hidden_size)
    scale = _PREVIOUS_SCALE * rms / _CONSTANT
    key = torch.cat([fast, torch.zeros_like(fast)])
    for number in range(BEFORE):
        angles = frequencies * (number + 1)
        query = torch.cat([fast * torch.cos(angles), -fast * torch.sin(angles)])
        keys = slice(number * size, (number + 1) * size)
        queries = slice(number * group * size, (number * group + 1) * size)
        for weight, rows, values in ((attention.q_proj, queries, query), (attention.k_proj, keys, key)):
            weight.weight[rows] = 0
            weight.weight[rows, content] = values * scale
        attention.v_proj.weight[keys] = 0
        attention.v_proj.weight[keys, :content] = projection
        start = content + 1 + number * size
        attention.o_proj.weight[:, queries] = 0
        attention.o_proj.weight[start : start + size, queries] = torch.eye(size)


def _attend_to_matches(model: LlamaForCausalLM, projection: torch.Tensor, generator: torch.Generator) -> None:
    """Let each key head of layer 1 attend to places that follow the current two tokens, and write what is there.

    Together, the heads write the whole embedding: each has its own part of an orthogonal basis. The product of query
    and key uses the slow rotary frequencies alone, half of them for each token.
    """
    attention = model.model.layers[1].self_attn
    frequencies = _frequencies(model)
    hidden, heads = model.config.hidden_size, model.config.num_key_value_heads
    group = model.config.num_attention_heads // heads
    size, content = projection.shape
    slow = (frequencies < _SLOW).nonzero().flatten()
    current, before = slow, slow + len(frequencies)
    first, second = content + 1, content + 1 + size  # of the token before, and of the one before that
    basis = torch.linalg.qr(torch.randn(content, content, generator=generator)).Q
    for number in range(heads):
        keys = slice(number * size, (number + 1) * size)
        queries = slice(number * group * size, (number * group + 1) * size)
        chosen = torch.randperm(size, generator=generator)[: len(slow)]
        query, key = torch.zeros(size, hidden), torch.zeros(size, hidden)
        query[current, :content] = projection[chosen] * _MATCH_SCALE
        key[current, first + chosen] = _MATCH_SCALE
        query[before, first + chosen] = _MATCH_SCALE
        key[before, second + chosen] = _MATCH_SCALE
        attention.q_proj.weight[queries] = query
        attention.k_proj.weight[keys] = key
        part = basis[:, number * size : (number + 1) * size].T  # at most [D, E]
        attention.v_proj.weight[keys] = 0
        attention.v_proj.weight[number * size : number * size + len(part), :content] = part
        attention.o_proj.weight[:, queries] = 0
        start = number * group * size
        attention.o_proj.weight[:content, start : start + len(part)] = part.T * _WRITE_SCALE
