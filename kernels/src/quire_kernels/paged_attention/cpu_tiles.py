"""The two products of attention with AMX's tiles: scores of queries by keys, and weighted sums of values."""

from typing import Any

import numpy as np
from numba import carray, njit

from quire_kernels.cpu_runtime.micro_kernel import WIDTH
from quire_kernels.cpu_runtime.scalars import int32_pointer
from quire_kernels.cpu_runtime.tiles import TILE_ROWS, tile_product

# Tiles of rows by tiles of 16 tokens, or of 16 components of a value.
_KEYS_1_1 = tile_product("tdpbf16ps", down=1, across=1)
_KEYS_1_2 = tile_product("tdpbf16ps", down=1, across=2)
_KEYS_2_1 = tile_product("tdpbf16ps", down=2, across=1)
_KEYS_2_2 = tile_product("tdpbf16ps", down=2, across=2)
_VALUES_1_1 = tile_product("tdpbf16ps", down=1, across=1, listed=True)
_VALUES_1_2 = tile_product("tdpbf16ps", down=1, across=2, listed=True)
_VALUES_2_1 = tile_product("tdpbf16ps", down=2, across=1, listed=True)
_VALUES_2_2 = tile_product("tdpbf16ps", down=2, across=2, listed=True)


@njit
def score_in_tiles(queries: Any, strips: Any, first: Any, last: Any, step: Any, units: Any, scores: Any) -> None:
    """Compute the scores of the tokens of some strips with tiles of ``units`` units, for whole tiles of rows."""
    rows, all_units = queries.shape
    q_stride, s_stride, line = all_units * 4, scores.shape[1] * 4, WIDTH * 4
    q_down, s_down, q_step, k_step = TILE_ROWS * q_stride, TILE_ROWS * s_stride, units * 4, units * step
    steps = all_units // units
    for strip in range(first, last, 2):
        k, pairs = strips[strip], strip + 1 < last
        beside = strips[strip + 1] - k if pairs else 0
        for row in range(0, rows, 2 * TILE_ROWS):
            q = queries.ctypes.data + row * q_stride
            s = scores.ctypes.data + row * s_stride + strip * line
            if row + TILE_ROWS < rows:
                if pairs:
                    _KEYS_2_2(
                        q, q_down, q_step, q_stride, k, 0, beside, k_step, step, steps, s, s_down, line, s_stride, True
                    )
                else:
                    _KEYS_2_1(q, q_down, q_step, q_stride, k, 0, 0, k_step, step, steps, s, s_down, 0, s_stride, True)
            elif pairs:
                _KEYS_1_2(q, 0, q_step, q_stride, k, 0, beside, k_step, step, steps, s, 0, line, s_stride, True)
            else:
                _KEYS_1_1(q, 0, q_step, q_stride, k, 0, 0, k_step, step, steps, s, 0, 0, s_stride, True)


@njit
def add_values_in_tiles(
    weights: Any, tokens: Any, strips: Any, step: Any, units: Any, attended: Any, last: Any
) -> None:
    """Add the weighted values with tiles of ``units`` units, for whole tiles of rows.

    Memory after the last token may contain NaN. The last tile is therefore copied to ``last`` and filled with 0.
    """
    each = 2 * units * 4 // (WIDTH * 4)  # The number of strips in a tile.
    whole = tokens // (2 * units)
    steps = whole
    if whole * 2 * units < tokens:
        _copy_last_tile(last, strips[whole * each], tokens - whole * 2 * units)
        strips[whole * each] = last.ctypes.data
        steps += 1
    rows, dim = attended.shape
    w_stride, a_stride, line = weights.shape[1] * 4, dim * 4, WIDTH * 4
    w_down, a_down, w_step, v_step = TILE_ROWS * w_stride, TILE_ROWS * a_stride, units * 4, each * 8
    v = strips.ctypes.data
    for vector in range(0, dim // WIDTH, 2):
        across, pairs = vector * line, vector + 1 < dim // WIDTH
        for row in range(0, rows, 2 * TILE_ROWS):
            w = weights.ctypes.data + row * w_stride
            a = attended.ctypes.data + row * a_stride + across
            if row + TILE_ROWS < rows:
                if pairs:
                    _VALUES_2_2(
                        w,
                        w_down,
                        w_step,
                        w_stride,
                        v,
                        across,
                        line,
                        v_step,
                        step,
                        steps,
                        a,
                        a_down,
                        line,
                        a_stride,
                        False,
                    )
                else:
                    _VALUES_2_1(
                        w, w_down, w_step, w_stride, v, across, 0, v_step, step, steps, a, a_down, 0, a_stride, False
                    )
            elif pairs:
                _VALUES_1_2(w, 0, w_step, w_stride, v, across, line, v_step, step, steps, a, 0, line, a_stride, False)
            else:
                _VALUES_1_1(w, 0, w_step, w_stride, v, across, 0, v_step, step, steps, a, 0, 0, a_stride, False)


@njit
def _copy_last_tile(target: Any, source: Any, tokens: Any) -> None:
    units, dim = target.shape
    target[:] = 0
    given = carray(int32_pointer(source), (units, dim))
    for unit in range(tokens // 2):
        target[unit] = given[unit]
    if tokens % 2:
        for i in range(dim):
            target[tokens // 2, i] = given[tokens // 2, i] & np.int32(0xFFFF)
