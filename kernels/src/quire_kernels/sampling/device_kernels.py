"""A survey of rows of logits: the first two launches of the ops that sample or report probabilities.

A row is split into parts with a program each, so that many multiprocessors read one row of a large vocabulary. The
first launch finds each part's largest logit. The second computes the part's weights relative to the row's largest:
their sum, and the number and mass of tokens above a few heights. From these, the third launch, one program per row,
makes a list of candidates. The results have the same bits for every number of parts (see ``device_functions``).

Legend: B rows, V vocabulary, P parts (a power of two), N pivots.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from quire_kernels.sampling.device_functions import NUM_PIVOTS, heights_of, inverse_of, load_logits, pivot_at, units_of
from quire_kernels.triton_runtime.config import config_for
from quire_kernels.triton_runtime.debug import kernel
from quire_kernels.triton_runtime.device import device_properties, require_device, target_of
from quire_kernels.triton_runtime.launch import Launch, launches
from quire_kernels.triton_runtime.target import Target

MOST_PARTS = 64
"""A power of two. The number of parts is not a constexpr, because a growing batch would then trigger compilations."""
_SHORTEST_PART = 2048
"""The minimum length of a part; a program that reads less costs more to start than it reads."""
MOST_CANDIDATES = 8192
"""Places in a row's list: small enough to stay in a program's cache."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Survey:
    """The workspace of B rows: 16 P + 64 P + 8 · MOST_CANDIDATES bytes each, of which the lists are 64 KiB."""

    parts: int
    part_length: int
    largest: Tensor  # [B, P] float32
    tokens: Tensor  # [B, P] int64: the first token with the largest logit
    units: Tensor  # [B, P] int64
    counts: Tensor  # [B, P, N] int32: the number of tokens at or above each pivot
    masses: Tensor  # [B, P, N] float32: their approximate weight
    list_logits: Tensor  # [B, MOST_CANDIDATES], dtype of the logits
    list_tokens: Tensor  # [B, MOST_CANDIDATES] int32


def number_of_parts(rows: int, vocabulary: int, multiprocessors: int) -> int:
    """Return a power of two: two programs per multiprocessor if no part becomes too short."""
    wanted = min(-(-2 * multiprocessors // max(rows, 1)), vocabulary // _SHORTEST_PART, MOST_PARTS)
    return 1 << max(wanted, 1).bit_length() - 1


def length_of_part(vocabulary: int, parts: int) -> int:
    """Return a multiple of 16, so that every part starts at a vector of logits."""
    return -(-vocabulary // (16 * parts)) * 16


@kernel(varying=["parts", "num_lines"])
def _largest_kernel(
    logits,
    row_stride,
    lines,
    vocabulary,
    part_length,
    parts,
    largest,
    tokens,
    num_lines,
    HAS_LINES: tl.constexpr,
    TILE: tl.constexpr,
) -> None:
    """Compute largest[b, p], tokens[b, p] = max and first argmax of part p of row b. Grid: B, P."""
    item, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    line = item
    if HAS_LINES:
        line = tl.load(lines + item)
        tl.device_assert((line >= 0) & (line < num_lines), "token_logprobs: lines leave the logits")
    row = logits + line * row_stride
    begin = part * part_length
    end = tl.minimum(begin + part_length, vocabulary)
    lanes = tl.arange(0, TILE)
    best = tl.full((TILE,), float("-inf"), tl.float32)
    place = begin + lanes
    for start in range(begin, end, TILE):
        offsets = start + lanes
        found = load_logits(row, offsets, end)
        place = tl.where(found > best, offsets, place)
        best = tl.maximum(best, found)
    top = tl.max(best, axis=0)
    first = tl.min(tl.where(best == top, place, 0x7FFFFFFF), axis=0)
    tl.store(largest + item * parts + part, top)
    tl.store(tokens + item * parts + part, first.to(tl.int64))


@kernel(varying=["parts"])
def _weigh_kernel(
    logits,
    row_stride,
    lines,
    temperature,
    vocabulary,
    part_length,
    parts,
    largest,
    units,
    counts,
    masses,
    MOST_PARTS: tl.constexpr,
    HAS_LINES: tl.constexpr,
    HAS_TEMPERATURE: tl.constexpr,
    TILE: tl.constexpr,
) -> None:
    """Compute units[b, p] = sum over part p of row b of exp((logit - largest of the row) / temperature). Grid: B, P."""
    item, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    inverse = 1.0
    if HAS_TEMPERATURE:
        heat = tl.load(temperature + item)
        if heat == 0.0:
            return
        inverse = inverse_of(heat)
    line = item
    if HAS_LINES:
        line = tl.load(lines + item)
    row = logits + line * row_stride
    others = tl.arange(0, MOST_PARTS)
    top = tl.max(tl.load(largest + item * parts + others, mask=others < parts, other=float("-inf")), axis=0)
    begin = part * part_length
    end = tl.minimum(begin + part_length, vocabulary)
    lanes = tl.arange(0, TILE)
    pivots = pivot_at(tl.arange(0, NUM_PIVOTS))
    total = tl.zeros((TILE,), tl.int64)
    count = tl.zeros((NUM_PIVOTS, TILE), tl.int32)
    mass = tl.zeros((NUM_PIVOTS, TILE), tl.float32)
    for start in range(begin, end, TILE):
        heights = heights_of(load_logits(row, start + lanes, end), top, inverse)
        weights = tl.exp(heights)
        total += units_of(heights)
        above = heights[None, :] >= pivots[:, None]
        count += above.to(tl.int32)
        mass += tl.where(above, weights[None, :], 0.0)
    place = item * parts + part
    tl.store(units + place, tl.sum(total, axis=0))
    each = place * NUM_PIVOTS + tl.arange(0, NUM_PIVOTS)
    tl.store(counts + each, tl.sum(count, axis=1))
    tl.store(masses + each, tl.sum(mass, axis=1))


@triton.jit
def list_candidates(
    row,
    vocabulary,
    part_length,
    parts,
    largest,
    inverse,
    counts,
    chosen,
    list_logits,
    list_tokens,
    TILE: tl.constexpr,
) -> None:
    """Write the tokens at or above pivot ``chosen`` to the row's list, in token order.

    The caller ensures that there is room, and synchronizes the program's threads before it reads the list.
    """
    lanes = tl.arange(0, TILE)
    pivot = pivot_at(chosen)
    size = chosen * 0
    for part in range(parts):
        if tl.load(counts + part * NUM_PIVOTS + chosen) > 0:
            end = tl.minimum((part + 1) * part_length, vocabulary)
            for start in range(part * part_length, end, TILE):
                tokens = start + lanes
                logits = load_logits(row, tokens, end)
                taken = heights_of(logits, largest, inverse) >= pivot
                places = size + tl.cumsum(taken.to(tl.int32), axis=0) - 1
                tl.store(list_logits + places, logits, mask=taken)
                tl.store(list_tokens + places, tokens, mask=taken)
                size += tl.sum(taken.to(tl.int32), axis=0)


def survey(
    op: str, logits: Tensor, rows: int, *, lines: Tensor | None = None, temperature: Tensor | None = None
) -> Survey:
    """Run the first two launches over ``rows`` rows of logits [R, V]: the rows ``lines`` [B], or the first ones.

    temperature  [B] float32; rows with 0 get no weights. None means 1
    """
    vocabulary, device = logits.shape[1], logits.device
    require_device(op, device)
    parts = number_of_parts(rows, vocabulary, device_properties(device).multiprocessors)
    by_part, by_pivot = (rows, parts), (rows, parts, NUM_PIVOTS.value)
    found = Survey(
        parts=parts,
        part_length=length_of_part(vocabulary, parts),
        largest=torch.empty(by_part, dtype=torch.float32, device=device),
        tokens=torch.empty(by_part, dtype=torch.int64, device=device),
        units=torch.empty(by_part, dtype=torch.int64, device=device),
        counts=torch.empty(by_pivot, dtype=torch.int32, device=device),
        masses=torch.empty(by_pivot, dtype=torch.float32, device=device),
        # Triton wants one type for a row of logits and its list of candidates.
        list_logits=torch.empty((rows, MOST_CANDIDATES), dtype=logits.dtype, device=device),
        list_tokens=torch.empty((rows, MOST_CANDIDATES), dtype=torch.int32, device=device),
    )
    find_largest(logits, found.largest, found.tokens, lines)
    _weigh(lines is not None, temperature is not None, target_of(device))(
        (rows, parts),
        logits,
        logits.stride(0),
        lines,
        temperature,
        vocabulary,
        found.part_length,
        parts,
        found.largest,
        found.units,
        found.counts,
        found.masses,
    )
    return found


@launches
def _weigh(has_lines: bool, has_temperature: bool, target: Target) -> Launch:
    options = config_for("sampling.weigh", target).options
    return Launch(_weigh_kernel, MOST_PARTS=MOST_PARTS, HAS_LINES=has_lines, HAS_TEMPERATURE=has_temperature, **options)


def find_largest(logits: Tensor, largest: Tensor, tokens: Tensor, lines: Tensor | None) -> None:
    """Write the largest logit and its first token of each part to ``largest`` and ``tokens`` [B, P]."""
    rows, parts = largest.shape
    _largest(lines is not None, target_of(logits.device))(
        (rows, parts),
        logits,
        logits.stride(0),
        lines,
        logits.shape[1],
        length_of_part(logits.shape[1], parts),
        parts,
        largest,
        tokens,
        logits.shape[0],
    )


@launches
def _largest(has_lines: bool, target: Target) -> Launch:
    return Launch(_largest_kernel, HAS_LINES=has_lines, **config_for("sampling.largest", target).options)
