"""The inner loop of products with packed weights, as vector instructions: one tile of results stays in registers.

C[r, c] = sum over u of A[r, u] . W[u, c], for up to ``ROWS`` rows and a panel of 32 columns. A *unit* u is four bytes
of activations along K: four uint8 (with int8 weights), two bfloat16, or one float32 (with float32 or float16 weights).
A panel stores its units in order, each with all 32 columns, so each weight is read once, sequentially, and used for all
rows of the tile.

Sums of bytes are integers, and the other sums follow the order of K. The result therefore does not depend on the tile
that computes it.
"""

from collections.abc import Callable
from typing import Any

import llvmlite.binding
from llvmlite import ir
from numba import njit, types
from numba.core import cgutils
from numba.extending import intrinsic

from quire_kernels.cpu_runtime.features import byte_products, has_avx512
from quire_kernels.cpu_runtime.scalars import prefetch_at

PANEL = 32
"""The number of columns that are packed together."""

_LANES = 16
_I16 = ir.IntType(16)
_I32 = ir.IntType(32)
_BYTES = ir.IntType(8).as_pointer()
_INTEGERS = ir.VectorType(_I32, _LANES)
_FLOATS = ir.VectorType(ir.FloatType(), _LANES)
_HALVES = ir.VectorType(ir.HalfType(), _LANES)
_CONTRACT = ("contract",)

_Step = Callable[[Any, list[list[Any]], list[Any], Any, list[Any]], None]
"""Code for one unit. The arguments are the builder, the cells of sums by row and vector, the addresses of the unit in
every third row, the stride between rows in bytes, and the vectors of weights."""


def _spelt_out(instruction: str, sums: Any) -> _Step:
    """Return the step as inline assembly.

    LLVM's own schedule loads the activations of many rows early and then lacks registers for the sums.
    """
    # numba does not initialize the assembly parser. Code that is loaded from the cache does not need it.
    llvmlite.binding.initialize_native_asmparser()

    def step(builder: Any, cells: list[list[Any]], places: list[Any], stride: Any, weights: list[Any]) -> None:
        for first in range(0, len(cells), 3):
            group = [cell for row in cells[first : first + 3] for cell in row]
            spare, count, vectors = len(group), len(group), len(weights)
            # Operands: the sums, a spare register, the sums again, the address, the stride, the weights.
            place, step_ = f"${2 * count + 1}", f"${2 * count + 2}"
            addresses = (f"({place})", f"({place},{step_})", f"({place},{step_},2)")
            lines = []
            for row in range(count // vectors):
                lines.append(f"vpbroadcastd {addresses[row]}, ${spare}")
                lines += [f"{instruction} ${2 * count + 3 + v}, ${spare}, ${row * vectors + v}" for v in range(vectors)]
            operands = [*map(builder.load, group), places[first // 3], stride, *weights]
            constraints = ["=v"] * count + ["=&v"] + [str(i) for i in range(count)] + ["r", "r"] + ["v"] * vectors
            kind = ir.FunctionType(
                ir.LiteralStructType([sums] * count + [_INTEGERS]), [operand.type for operand in operands]
            )
            code = ir.InlineAsm(kind, "\n".join(lines), ",".join(constraints), side_effect=True)
            results = builder.call(code, operands)
            for i, cell in enumerate(group):
                builder.store(builder.extract_value(results, i), cell)

    return step


def _row_of(builder: Any, places: list[Any], stride: Any, row: int) -> Any:
    byte = builder.bitcast(places[row // 3], _BYTES)
    offset = builder.mul(stride, ir.Constant(stride.type, row % 3))
    return builder.bitcast(builder.gep(byte, [offset]), _I32.as_pointer())


def _composed(dot: Callable[[Any, Any, Any, Any], Any]) -> _Step:
    """Return a step from a function (builder, sums, the row's unit in every lane, weights) -> new sums."""

    def step(builder: Any, cells: list[list[Any]], places: list[Any], stride: Any, weights: list[Any]) -> None:
        for row, sums in enumerate(cells):
            splat = _splat(builder, builder.load(_row_of(builder, places, stride, row), align=4))
            for cell, vector in zip(sums, weights, strict=True):
                builder.store(dot(builder, builder.load(cell), splat, vector), cell)

    return step


def _dot_floats(builder: Any, total: Any, activations: Any, weights: Any) -> Any:
    a, w = builder.bitcast(activations, _FLOATS), builder.bitcast(weights, _FLOATS)
    return builder.fadd(total, builder.fmul(a, w, flags=_CONTRACT), flags=_CONTRACT)


def _dot_avx_vnni(builder: Any, total: Any, activations: Any, weights: Any) -> Any:
    def half(total: Any, activations: Any, weights: Any) -> Any:
        return _call(builder, "llvm.x86.avx512.vpdpbusd.256", total.type, total, activations, weights)

    return _by_halves(builder, half, total, activations, weights)


def _dot_avx2(builder: Any, total: Any, activations: Any, weights: Any) -> Any:
    """Multiply even and odd bytes separately as 16-bit numbers, because AVX2's instruction for bytes saturates."""
    shorts = ir.VectorType(_I16, _LANES)
    eight, low_byte = ir.Constant(shorts, [8] * _LANES), ir.Constant(shorts, [255] * _LANES)

    def half(total: Any, activations: Any, weights: Any) -> Any:
        a, w = builder.bitcast(activations, shorts), builder.bitcast(weights, shorts)
        odd = builder.lshr(a, eight), builder.ashr(w, eight)
        even = builder.and_(a, low_byte), builder.ashr(builder.shl(w, eight), eight)
        for pair in (odd, even):
            total = builder.add(total, _call(builder, "llvm.x86.avx2.pmadd.wd", total.type, *pair))
        return total

    return _by_halves(builder, half, total, activations, weights)


def _dot_anywhere(builder: Any, total: Any, activations: Any, weights: Any) -> Any:
    def lanes(value: int) -> Any:
        return ir.Constant(_INTEGERS, [value] * _LANES)

    for byte in range(4):
        activation = builder.and_(builder.lshr(activations, lanes(8 * byte)), lanes(255))
        weight = builder.ashr(builder.shl(weights, lanes(24 - 8 * byte)), lanes(24))
        total = builder.add(total, builder.mul(activation, weight))
    return total


def _by_halves(builder: Any, compute: Callable[[Any, Any, Any], Any], *operands: Any) -> Any:
    none, half = ir.Constant(_INTEGERS, ir.Undefined), _LANES // 2

    def lanes(first: int, count: int) -> Any:
        return ir.Constant(ir.VectorType(_I32, count), list(range(first, first + count)))

    parts = [
        compute(*(builder.shuffle_vector(operand, none, lanes(first, half)) for operand in operands))
        for first in (0, half)
    ]
    return builder.shuffle_vector(*parts, lanes(0, _LANES))


def _call(builder: Any, name: str, result: Any, *operands: Any) -> Any:
    kind = ir.FunctionType(result, [operand.type for operand in operands])
    return builder.call(builder.module.declare_intrinsic(name, (), kind), operands)


def _splat(builder: Any, value: Any) -> Any:
    none = ir.Constant(_INTEGERS, ir.Undefined)
    single = builder.insert_element(none, value, ir.Constant(_I32, 0))
    return builder.shuffle_vector(single, none, ir.Constant(_INTEGERS, [0] * _LANES))


# Of AVX-512's 32 registers 24 hold sums. With 16 registers of half the length, 6 rows of one vector use twelve, and 2
# rows of two vectors eight.
ROWS, _WIDE_ROWS = (12, 12) if has_avx512() else (6, 2)
"""The maximum number of rows in a tile."""
_ALL_VECTORS = PANEL // _LANES

_AHEAD = 8192
"""The bytes between the weights that are multiplied and those that are prefetched, if a panel is read once. The CPU
itself reads ahead within a page of memory only."""


@njit
def prefetching(rows: Any, tiles: Any, unit_bytes: Any, panel: Any, next_panel: Any) -> Any:
    """Return the first address to prefetch while ``rows`` in ``tiles`` are multiplied by a panel, and the pace.

    If several passes read the panel, they share the prefetching of the next one: so memory is read at all times.
    """
    passes = 0
    for tile in range(tiles):
        passes += 1 if rows * (tile + 1) // tiles - rows * tile // tiles <= _WIDE_ROWS else PANEL // _LANES
    if passes == 1:
        return panel + _AHEAD, unit_bytes
    return next_panel, (unit_bytes + passes - 1) // passes


def _tile(rows: int, step: _Step, sums: Any, vectors: int, *, halves: bool) -> Any:
    """Return the intrinsic that multiplies ``rows`` rows, with ``vectors`` vectors of columns computed together.

    halves  the weights are float16, and are widened to float32
    """
    width = _LANES // 2 if halves else _LANES  # the int32 numbers of memory that hold a vector of weights

    @intrinsic
    def tile(typingctx: Any, a: Any, a_stride: Any, weights: Any, depth: Any, c: Any, ahead: Any, pace: Any) -> Any:
        def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            a_ptr, a_step, w_ptr, count, c_ptr, next_line, pace_bytes = args

            def load(place: Any) -> Any:
                if not halves:
                    return builder.load(builder.bitcast(place, _INTEGERS.as_pointer()), align=4)
                loaded = builder.load(builder.bitcast(place, _HALVES.as_pointer()), align=4)
                return builder.bitcast(builder.fpext(loaded, _FLOATS), _INTEGERS)

            def number(value: int) -> Any:
                return ir.Constant(count.type, value)

            cells = [[cgutils.alloca_once(builder, sums) for _ in range(vectors)] for _ in range(rows)]
            for cell in (cell for row in cells for cell in row):
                builder.store(ir.Constant(sums, None), cell)
            # The rows in between are one and two strides away, which fits into an addressing mode.
            thirds = [builder.gep(a_ptr, [builder.mul(a_step, number(row))]) for row in range(0, rows, 3)]
            stride = builder.mul(a_step, number(4))
            with cgutils.for_range(builder, count) as loop:
                unit = builder.gep(w_ptr, [builder.mul(loop.index, number(_ALL_VECTORS * width))])
                loaded = [load(builder.gep(unit, [number(width * v)])) for v in range(vectors)]
                line = builder.add(next_line, builder.mul(loop.index, pace_bytes))
                half = builder.lshr(pace_bytes, number(1))
                for address in (line, builder.add(line, half)):
                    prefetch_at(builder, builder.inttoptr(address, _BYTES))
                step(builder, cells, [builder.gep(third, [loop.index]) for third in thirds], stride, loaded)
            for row in range(rows):
                for v, cell in enumerate(cells[row]):
                    target = builder.gep(c_ptr, [number(PANEL * row + _LANES * v)])
                    builder.store(builder.load(cell), builder.bitcast(target, sums.as_pointer()), align=4)
            return context.get_dummy_value()

        i64 = types.int64
        return types.void(a, i64, weights, i64, c, i64, i64), codegen

    return tile


@intrinsic
def advance(typingctx: Any, pointer: Any, elements: Any) -> Any:
    """Return the pointer advanced by a number of elements."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.gep(args[0], [args[1]])

    return pointer(pointer, types.int64), codegen


def _by_rows(step: _Step, sums: Any, *, halves: bool = False) -> Any:  # noqa: C901 - a choice among twelve
    """Return multiply(rows, a, a_stride, weights, depth, c, ahead, pace): C[0:rows, 0:32] = A . W.

    rows      at most ``ROWS``
    a         points to units of four bytes; ``a_stride`` and ``depth`` count units
    weights   points to the panel, as int32 whatever it holds
    c         [rows, 32]
    ahead     the address of what is prefetched meanwhile: ``depth`` times ``pace`` bytes in each pass over the panel

    The result is the address that follows what was prefetched.
    """
    sizes = [min(rows, ROWS) for rows in range(1, 13)]
    tiles = [_tile(rows, step, sums, _ALL_VECTORS if rows <= _WIDE_ROWS else 1, halves=halves) for rows in sizes]
    tile_1, tile_2, tile_3, tile_4, tile_5, tile_6, tile_7, tile_8, tile_9, tile_10, tile_11, tile_12 = tiles
    wide_rows, width = _WIDE_ROWS, _LANES // 2 if halves else _LANES

    @njit
    def multiply(  # noqa: C901
        rows: Any, a: Any, a_stride: Any, weights: Any, depth: Any, c: Any, ahead: Any, pace: Any
    ) -> Any:
        # Few rows read a panel once, in order, because memory bandwidth limits them.
        for column in range(0, PANEL, PANEL if rows <= wide_rows else _LANES):
            w, out = advance(weights, column // _LANES * width), advance(c, column)
            if rows == 12:
                tile_12(a, a_stride, w, depth, out, ahead, pace)
            elif rows == 11:
                tile_11(a, a_stride, w, depth, out, ahead, pace)
            elif rows == 10:
                tile_10(a, a_stride, w, depth, out, ahead, pace)
            elif rows == 9:
                tile_9(a, a_stride, w, depth, out, ahead, pace)
            elif rows == 8:
                tile_8(a, a_stride, w, depth, out, ahead, pace)
            elif rows == 7:
                tile_7(a, a_stride, w, depth, out, ahead, pace)
            elif rows == 6:
                tile_6(a, a_stride, w, depth, out, ahead, pace)
            elif rows == 5:
                tile_5(a, a_stride, w, depth, out, ahead, pace)
            elif rows == 4:
                tile_4(a, a_stride, w, depth, out, ahead, pace)
            elif rows == 3:
                tile_3(a, a_stride, w, depth, out, ahead, pace)
            elif rows == 2:
                tile_2(a, a_stride, w, depth, out, ahead, pace)
            else:
                tile_1(a, a_stride, w, depth, out, ahead, pace)
            ahead += depth * pace
        return ahead

    return multiply


def _byte_step() -> _Step:
    match byte_products():
        case "avx512-vnni":
            return _spelt_out("vpdpbusd", _INTEGERS)
        case "avx-vnni":
            return _composed(_dot_avx_vnni)
        case "avx2":
            return _composed(_dot_avx2)
        case "none":
            return _composed(_dot_anywhere)


multiply_bytes = _by_rows(_byte_step(), _INTEGERS)
"""Products of A's unsigned bytes and W's signed bytes, accumulated in int32."""


multiply_floats = _by_rows(_composed(_dot_floats), _FLOATS)
"""Products of float32."""

multiply_halves = _by_rows(_composed(_dot_floats), _FLOATS, halves=True)
"""Products of float32 with float16 weights, accumulated in float32."""


def make_pair_product() -> Any:
    """Return the product of bfloat16 pairs, accumulated in float32; requires ``multiplies_bfloat16``."""
    return _by_rows(_spelt_out("vdpbf16ps", _FLOATS), _FLOATS)
