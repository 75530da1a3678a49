"""The comparison of a loaded model with its own forward pass: packed sequences, in chunks, against each alone.

It finds differences that only values show: positions that the model counts in its own way, layers that look across the
borders between sequences, attention that the kernel computes differently.

Legend: T tokens of a step, B its sequences, S block size, M blocks per sequence.
"""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from quire_engine.errors import ModelFolderError
from quire_engine.model.layers import GroupInputs, ModelInputs
from quire_engine.model.shape import LayerHeads, ModelShape
from quire_engine.model.transformers_backend.attention import SERVING
from quire_engine.model.transformers_backend.model import TransformersModel
from quire_kernels.kv_cache import KVCache, allocate_kv_cache
from quire_kernels.paged_attention import plan_attention

_BLOCK_SIZE = 16
# By sequence, the tokens of each step: a prompt in chunks, whole prompts, then one token at a time.
_CHUNKS = ((5, 1, 1, 0), (17, 16, 1, 1), (23, 1, 2, 1))
# The root mean square of a row's difference, relative to the row's standard deviation.
_TOLERANCES = {torch.float32: 2e-3, torch.float16: 5e-2, torch.bfloat16: 2e-1}


def check_faithful(
    model: PreTrainedModel, served: TransformersModel, shape: ModelShape, dtype: torch.dtype, device: torch.device
) -> None:
    """Raise ModelFolderError if the packed model's results differ from the model's own, both on ``device``."""
    chunks = _fitting(shape.max_position_embeddings)
    generator = torch.Generator().manual_seed(0)
    drawn = [torch.randint(shape.vocab_size, (sum(lengths),), generator=generator) for lengths in chunks]
    sequences = [tokens.to(device) for tokens in drawn]
    try:
        expected = _alone(model, sequences)
        found = _packed(served, shape, sequences, chunks, dtype)
    except Exception as error:  # the model's own code can raise any exception
        raise ModelFolderError(
            f"{shape.architecture} cannot be served: its load check failed with {type(error).__name__}:"
            f" {' '.join(str(error).split())[:300]}"
        ) from error
    difference = max(
        float((row - alone[place]).square().mean().sqrt() / alone[place].std().clamp_min(1e-12))
        for alone, rows in zip(expected, found, strict=True)
        for place, row in rows.items()
    )
    if not difference <= _TOLERANCES[dtype]:  # the comparison also rejects NaN
        raise ModelFolderError(
            f"{shape.architecture} cannot be served faithfully: with several sequences in a batch its logits differ by"
            f" {difference:.2g} of their standard deviation from those of each sequence alone"
        )


def _fitting(positions: int) -> list[tuple[int, ...]]:
    chosen: list[tuple[int, ...]] = [lengths for lengths in _CHUNKS if sum(lengths) <= positions]
    return chosen or [(positions, 0, 0, 0)]


def _alone(model: PreTrainedModel, sequences: Sequence[Tensor]) -> list[Tensor]:
    """Return the logits [T, V] of each sequence, as transformers computes them."""
    model.set_attn_implementation("eager")
    try:
        return [model(input_ids=tokens.unsqueeze(0), use_cache=False).logits[0].float() for tokens in sequences]
    finally:
        model.set_attn_implementation(SERVING)


def _packed(
    served: TransformersModel,
    shape: ModelShape,
    sequences: Sequence[Tensor],
    chunks: Sequence[tuple[int, ...]],
    dtype: torch.dtype,
) -> list[dict[int, Tensor]]:
    """Return, by sequence and position, the logits of each chunk's last token."""
    width = -(-max(map(len, sequences)) // _BLOCK_SIZE)
    # Interleaved blocks, from the end: code that reads a sequence's tokens in order would find other sequences' tokens.
    tables = np.arange(len(sequences) * width, dtype=np.int32).reshape(width, -1).T[::-1].copy()  # [B, M]
    device = sequences[0].device
    caches = tuple(_small_cache(heads, tables.size, dtype, device) for heads in shape.layer_heads)
    found: list[dict[int, Tensor]] = [{} for _ in sequences]
    computed = [0] * len(sequences)
    for lengths in zip(*chunks, strict=True):
        running = [index for index, length in enumerate(lengths) if length]
        if not running:
            continue
        ends = [computed[index] + lengths[index] for index in running]
        inputs = _inputs(shape, sequences, tables, running, [computed[index] for index in running], ends)
        for index, end, row in zip(running, ends, served(inputs, caches).float(), strict=True):
            found[index][end - 1] = row
            computed[index] = end
    return found


def _small_cache(heads: LayerHeads, num_blocks: int, dtype: torch.dtype, device: torch.device) -> KVCache:
    return allocate_kv_cache(
        num_blocks=num_blocks,
        block_size=_BLOCK_SIZE,
        kv_heads=heads.kv_heads,
        head_dim=heads.head_dim,
        dtype=dtype,
        device=device,
    )


def _inputs(
    shape: ModelShape,
    sequences: Sequence[Tensor],
    tables: np.ndarray,
    running: list[int],
    starts: list[int],
    ends: list[int],
) -> ModelInputs:
    spans = list(zip(running, starts, ends, strict=True))
    positions = np.concatenate([np.arange(start, end) for _, start, end in spans])  # [T]
    owner = np.repeat(running, [end - start for _, start, end in spans])  # [T]
    slots = tables[owner, positions // _BLOCK_SIZE].astype(np.int64) * _BLOCK_SIZE + positions % _BLOCK_SIZE
    lengths = [end - start for _, start, end in spans]
    device = sequences[0].device
    groups = tuple(
        GroupInputs(
            slots=torch.from_numpy(slots).to(device),
            plan=plan_attention(
                block_tables=torch.from_numpy(tables[running]).to(device),
                query_lens=lengths,
                context_lens=ends,
                block_size=_BLOCK_SIZE,
                window=window,
                chunked=shape.chunked and window is not None,
            ),
        )
        for window in shape.kv_groups
    )
    return ModelInputs(
        token_ids=torch.cat([sequences[index][start:end] for index, start, end in spans]),
        positions=torch.from_numpy(positions).to(device),
        groups=groups,
        logits_rows=torch.from_numpy(np.cumsum(lengths) - 1).to(device),
    )
