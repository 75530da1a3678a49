"""The inner loops of CPU attention, written as vector instructions.

They compute scores of queries against transposed key blocks, and weighted sums of values. Each is a small matrix
product whose results stay in registers. LLVM does not find this register blocking in loops over arrays, so the vectors
are explicit; LLVM still selects the instructions (AVX-512, AVX2, NEON) for the machine.

A *unit* is four bytes of a row of queries or weights: one float32 or, if the CPU multiplies bfloat16 in pairs, two
bfloat16. In the second case the other matrix stores its columns in pairs as well. A *strip* is a block's data for 16
tokens: scores read one vector per strip for each unit of the head, and values one or more for each unit of tokens.
Every sum follows the order of its units, independently of the rows and strips that are computed with it.
"""

from collections.abc import Callable, Sequence
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from quire_kernels.cpu_runtime.features import has_avx512, multiplies_bfloat16

WIDTH = 16
"""The number of lanes in a vector and of tokens in a strip."""

# Results in registers: 24 of AVX-512's 32, which leaves some for operands; 4 x 16 floats are 8 of AVX2's 16.
_ROWS, _VECTORS = (range(6, 0, -1), (4, 2, 1)) if has_avx512() else (range(4, 0, -1), (1,))

_F32 = ir.FloatType()
_I32 = ir.IntType(32)
_I64 = ir.IntType(64)
_BYTES = ir.IntType(8).as_pointer()
_VECTOR = ir.VectorType(_F32, WIDTH)
_INTEGERS = ir.VectorType(_I32, WIDTH)
_CONTRACT = ("contract",)


class _Elements:
    """Units of one float32. Loads widen the stored element to float32."""

    pairs = False
    tokens = 1

    def __init__(self, stored: Any) -> None:
        self._stored = stored

    def load(self, builder: Any, place: Any) -> Any:
        if self._stored == types.float32:
            return builder.load(builder.bitcast(place, _VECTOR.as_pointer()), align=4)
        is_half = self._stored == types.int16
        kind = ir.VectorType(ir.HalfType() if is_half else ir.IntType(16), WIDTH)
        loaded = builder.load(builder.bitcast(place, kind.as_pointer()), align=2)
        if is_half:
            return builder.fpext(loaded, _VECTOR)
        shifted = builder.shl(builder.zext(loaded, _INTEGERS), ir.Constant(_INTEGERS, [16] * WIDTH))
        return builder.bitcast(shifted, _VECTOR)

    def splat(self, builder: Any, place: Any) -> Any:
        return _splat(builder, builder.load(builder.bitcast(place, _F32.as_pointer()), align=4))

    def add(self, builder: Any, total: Any, scalar: Any, vector: Any) -> Any:
        return builder.fadd(total, builder.fmul(vector, scalar, flags=_CONTRACT), flags=_CONTRACT)


class _Pairs:
    """Units of two bfloat16, multiplied in pairs and accumulated in float32."""

    pairs = True
    tokens = 2

    def load(self, builder: Any, place: Any) -> Any:
        return builder.load(builder.bitcast(place, _INTEGERS.as_pointer()), align=4)

    def splat(self, builder: Any, place: Any) -> Any:
        return _splat(builder, builder.load(builder.bitcast(place, _I32.as_pointer()), align=4))

    def add(self, builder: Any, total: Any, scalar: Any, vector: Any) -> Any:
        kind = ir.FunctionType(_VECTOR, [_VECTOR, _INTEGERS, _INTEGERS])
        product = builder.module.declare_intrinsic("llvm.x86.avx512bf16.dpbf16ps.512", (), kind)
        return builder.call(product, [total, scalar, vector])


def weighs_in_pairs(stored: Any) -> bool:
    """Return whether queries and weights are pairs of bfloat16 for values with this storage type."""
    return bool(stored == types.uint16) and multiplies_bfloat16()


def _units_of(stored: Any) -> Any:
    return _Pairs() if weighs_in_pairs(stored) else _Elements(stored)


@intrinsic
def is_in_pairs(typingctx: Any, block: Any) -> Any:
    """Return ``weighs_in_pairs`` for a worker's argument block, as a constant at compile time."""
    answer = weighs_in_pairs(block.dtype)

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return ir.Constant(ir.IntType(1), int(answer))

    return types.boolean(block), codegen


@intrinsic
def multiply_keys(
    typingctx: Any,
    block: Any,
    queries: Any,
    queries_stride: Any,
    rows: Any,
    depth: Any,
    strips: Any,
    count: Any,
    step: Any,
    scores: Any,
    scores_stride: Any,
) -> Any:
    """Compute scores[r, 16 s + t] = sum over i of queries[r, i] * strip s[i, t].

    queries, scores  addresses of ``rows`` rows, strides in units of four bytes
    depth            units of a row of queries
    strips           address of ``count`` addresses, of each strip's first vector; ``step`` bytes from one to the next
    """
    units = _units_of(block.dtype)

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        _, query, query_stride, row_count, terms, strip_list, strip_count, down, target, target_stride = args

        def tile(first_row: Any, rows: int, first_strip: Any, vectors: int) -> None:
            queries = _rows_from(builder, query, query_stride, first_row, rows)
            places = [_strip(builder, strip_list, builder.add(first_strip, _number(v))) for v in range(vectors)]
            cells = [[_cell(builder, ir.Constant(_VECTOR, [0.0] * WIDTH)) for _ in places] for _ in queries]
            with cgutils.for_range(builder, terms) as loop:
                below = builder.mul(loop.index, down)
                loaded = [units.load(builder, builder.gep(place, [below])) for place in places]
                _accumulate(builder, units, cells, queries, loop.index, loaded)
            for row, place in zip(cells, _rows_from(builder, target, target_stride, first_row, rows), strict=True):
                for v, cell in enumerate(row):
                    stored = _vector_at(builder, place, builder.add(first_strip, _number(v)))
                    builder.store(builder.load(cell), stored, align=4)

        def all_rows(first_strip: Any, vectors: int) -> None:
            _in_parts(builder, row_count, _ROWS, lambda row, rows: tile(row, rows, first_strip, vectors))

        _in_parts(builder, strip_count, _VECTORS, all_rows)
        return context.get_dummy_value()

    i64 = types.int64
    return types.void(block, i64, i64, i64, i64, i64, i64, i64, i64, i64), codegen


@intrinsic
def multiply_values(
    typingctx: Any,
    block: Any,
    weights: Any,
    weights_stride: Any,
    rows: Any,
    tokens: Any,
    strips: Any,
    vectors: Any,
    step: Any,
    sums: Any,
    sums_stride: Any,
) -> Any:
    """Compute sums[r, 16 v + c] += sum over t of weights[r, t] * value[t, 16 v + c].

    weights, sums  addresses of ``rows`` rows, strides in units of four bytes
    strips         address of the addresses of the first value in each 16 tokens; ``step`` bytes from unit to unit
    vectors        the number of vectors in a value
    """
    units = _units_of(block.dtype)
    vector_bytes = WIDTH * (4 if units.pairs else block.dtype.bitwidth // 8)
    of_strip = WIDTH // units.tokens

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        _, weight, weight_stride, row_count, token_count, strip_list, vector_count, down, target, target_stride = args
        whole = builder.udiv(token_count, _number(units.tokens))
        full = builder.udiv(whole, _number(of_strip))
        done = builder.mul(full, _number(of_strip))
        left = builder.sub(whole, done)

        def tile(first_row: Any, rows: int, first_vector: Any, vectors: int) -> None:
            weights = _rows_from(builder, weight, weight_stride, first_row, rows)
            across = builder.mul(first_vector, _number(vector_bytes))
            targets = [
                [_vector_at(builder, place, builder.add(first_vector, _number(v))) for v in range(vectors)]
                for place in _rows_from(builder, target, target_stride, first_row, rows)
            ]
            cells = [[_cell(builder, builder.load(place, align=4)) for place in row] for row in targets]

            def add(strip: Any, within: Any, index: Any, mask: Any | None = None) -> None:
                place = builder.gep(strip, [builder.add(across, builder.mul(within, down))])
                places = [builder.gep(place, [_number(v * vector_bytes)]) for v in range(vectors)]
                loaded = [units.load(builder, place) for place in places]
                if mask is not None:
                    loaded = [builder.and_(vector, mask) for vector in loaded]
                _accumulate(builder, units, cells, weights, index, loaded)

            with cgutils.for_range(builder, full) as outer:
                strip, first = _strip(builder, strip_list, outer.index), builder.mul(outer.index, _number(of_strip))
                with cgutils.for_range(builder, _number(of_strip)) as inner:
                    add(strip, inner.index, builder.add(first, inner.index))
            with builder.if_then(builder.icmp_unsigned("<", builder.mul(done, _number(units.tokens)), token_count)):
                strip = _strip(builder, strip_list, full)
                with cgutils.for_range(builder, left) as inner:
                    add(strip, inner.index, builder.add(done, inner.index))
                if units.pairs:
                    # The second token of the last pair does not exist: its weight is 0, but its memory may contain NaN.
                    with builder.if_then(builder.trunc(token_count, ir.IntType(1))):
                        add(strip, left, whole, ir.Constant(_INTEGERS, [0xFFFF] * WIDTH))
            for row, places in zip(cells, targets, strict=True):
                for cell, place in zip(row, places, strict=True):
                    builder.store(builder.load(cell), place, align=4)

        def all_rows(first_vector: Any, vectors: int) -> None:
            _in_parts(builder, row_count, _ROWS, lambda row, rows: tile(row, rows, first_vector, vectors))

        _in_parts(builder, vector_count, _VECTORS, all_rows)
        return context.get_dummy_value()

    i64 = types.int64
    return types.void(block, i64, i64, i64, i64, i64, i64, i64, i64, i64), codegen


def _in_parts(builder: Any, total: Any, sizes: Sequence[int], body: Callable[[Any, int], None]) -> None:
    """Cover 0 to ``total`` with calls of ``body(first, size)``, using each size as often as possible."""
    first, left = _number(0), total
    for size in sizes:
        times = builder.udiv(left, _number(size))
        with cgutils.for_range(builder, times) as loop:
            body(builder.add(first, builder.mul(loop.index, _number(size))), size)
        covered = builder.mul(times, _number(size))
        first, left = builder.add(first, covered), builder.sub(left, covered)


def _accumulate(
    builder: Any, units: Any, cells: list[list[Any]], rows: list[Any], index: Any, vectors: list[Any]
) -> None:
    along = builder.mul(index, _number(4))
    for cell_row, row in zip(cells, rows, strict=True):
        scalar = units.splat(builder, builder.gep(row, [along]))
        for cell, vector in zip(cell_row, vectors, strict=True):
            builder.store(units.add(builder, builder.load(cell), scalar, vector), cell)


def _number(value: int) -> Any:
    return ir.Constant(_I64, value)


def _splat(builder: Any, value: Any) -> Any:
    undefined = ir.Constant(ir.VectorType(value.type, WIDTH), ir.Undefined)
    single = builder.insert_element(undefined, value, ir.Constant(_I32, 0))
    return builder.shuffle_vector(single, undefined, ir.Constant(_INTEGERS, [0] * WIDTH))


def _cell(builder: Any, value: Any) -> Any:
    cell = cgutils.alloca_once(builder, _VECTOR)
    builder.store(value, cell)
    return cell


def _strip(builder: Any, strips: Any, index: Any) -> Any:
    place = builder.inttoptr(builder.add(strips, builder.mul(index, _number(8))), _I64.as_pointer())
    return builder.inttoptr(builder.load(place), _BYTES)


def _rows_from(builder: Any, address: Any, stride: Any, first: Any, rows: int) -> list[Any]:
    """Return the address of each row; ``stride`` is in units."""
    step = builder.mul(stride, _number(4))
    return [
        builder.inttoptr(builder.add(address, builder.mul(step, builder.add(first, _number(r)))), _BYTES)
        for r in range(rows)
    ]


def _vector_at(builder: Any, row: Any, index: Any) -> Any:
    place = builder.gep(row, [builder.mul(index, _number(WIDTH * 4))])
    return builder.bitcast(place, _VECTOR.as_pointer())
