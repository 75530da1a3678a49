"""The inner loop of CPU attention, written as vector instructions: a strip of a small matrix product.

C[r, 0:16] += sum over i of A[r, i] * B[i, 0:16], for 1 to 4 rows at once, with the rows of C in registers. Scores are
queries times a transposed key block; outputs are probabilities times a value block: both are this product. LLVM does
not find the register blocking by itself from loops over arrays, so the vectors are spelt out; it still chooses the
instructions (AVX-512, AVX2, NEON) for the machine.
"""

from typing import Any

from llvmlite import ir
from numba import njit, types
from numba.core import cgutils
from numba.extending import intrinsic

WIDTH = 16
ROWS = 4

_F32 = ir.FloatType()
_I32 = ir.IntType(32)
_VECTOR = ir.VectorType(_F32, WIDTH)
_CONTRACT = ("contract",)


def _load_vector(builder: Any, pointer: Any, stored: Any) -> Any:
    """Sixteen stored elements as float32."""
    if stored == types.float32:
        return builder.load(builder.bitcast(pointer, _VECTOR.as_pointer()), align=4)
    half = ir.VectorType(ir.HalfType() if stored == types.int16 else ir.IntType(16), WIDTH)
    loaded = builder.load(builder.bitcast(pointer, half.as_pointer()), align=2)
    if stored == types.int16:
        return builder.fpext(loaded, _VECTOR)
    wide = ir.VectorType(_I32, WIDTH)
    shifted = builder.shl(builder.zext(loaded, wide), ir.Constant(wide, [16] * WIDTH))
    return builder.bitcast(shifted, _VECTOR)


def _splat(builder: Any, value: Any) -> Any:
    single = builder.insert_element(ir.Constant(_VECTOR, ir.Undefined), value, ir.Constant(_I32, 0))
    zeros = ir.Constant(ir.VectorType(_I32, WIDTH), [0] * WIDTH)
    return builder.shuffle_vector(single, ir.Constant(_VECTOR, ir.Undefined), zeros)


def _strip(rows: int) -> Any:
    # Fewer rows leave the adders idle while they wait for themselves: give each row several partial sums.
    sums = {1: 4, 2: 2, 3: 2, 4: 2}[rows]

    @intrinsic
    def strip(typingctx: Any, a: Any, a_stride: Any, b: Any, b_stride: Any, depth: Any, c: Any, c_stride: Any) -> Any:
        def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            a_ptr, a_step, b_ptr, b_step, count, c_ptr, c_step = args
            whole = count.type
            targets = [builder.gep(c_ptr, [builder.mul(c_step, ir.Constant(whole, r))]) for r in range(rows)]
            targets = [builder.bitcast(target, _VECTOR.as_pointer()) for target in targets]
            cells = [[cgutils.alloca_once(builder, _VECTOR) for _ in range(sums)] for _ in range(rows)]
            for r in range(rows):
                builder.store(builder.load(targets[r], align=4), cells[r][0])
                for cell in cells[r][1:]:
                    builder.store(ir.Constant(_VECTOR, [0.0] * WIDTH), cell)

            def step(i: Any, which: int) -> None:
                vector = _load_vector(builder, builder.gep(b_ptr, [builder.mul(i, b_step)]), b.dtype)
                for r in range(rows):
                    place = builder.add(builder.mul(a_step, ir.Constant(whole, r)), i)
                    scalar = _splat(builder, builder.load(builder.gep(a_ptr, [place])))
                    product = builder.fmul(vector, scalar, flags=_CONTRACT)
                    cell = cells[r][which]
                    builder.store(builder.fadd(builder.load(cell), product, flags=_CONTRACT), cell)

            bulk = builder.sdiv(count, ir.Constant(whole, sums))
            with cgutils.for_range(builder, bulk) as loop:
                first = builder.mul(loop.index, ir.Constant(whole, sums))
                for s in range(sums):
                    step(builder.add(first, ir.Constant(whole, s)), s)
            done = builder.mul(bulk, ir.Constant(whole, sums))
            with cgutils.for_range(builder, builder.sub(count, done)) as loop:
                step(builder.add(done, loop.index), 0)

            for r in range(rows):
                total = builder.load(cells[r][0])
                for cell in cells[r][1:]:
                    total = builder.fadd(total, builder.load(cell))
                builder.store(total, targets[r], align=4)
            return context.get_dummy_value()

        return types.void(a, types.int64, b, types.int64, types.int64, c, types.int64), codegen

    return strip


_strip_1, _strip_2, _strip_3, _strip_4 = (_strip(rows) for rows in range(1, ROWS + 1))


@intrinsic
def advance(typingctx: Any, pointer: Any, elements: Any) -> Any:
    """The pointer so many elements on."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.gep(args[0], [args[1]])

    return pointer(pointer, types.int64), codegen


@njit
def multiply_strip(a: Any, a_stride: Any, b: Any, b_stride: Any, depth: Any, c: Any, c_stride: Any, rows: Any) -> None:
    """C[0:rows, 0:16] += A[0:rows, 0:depth] B[0:depth, 0:16]; pointers, strides in elements; A and C are float32."""
    row = 0
    while row + ROWS <= rows:
        _strip_4(advance(a, row * a_stride), a_stride, b, b_stride, depth, advance(c, row * c_stride), c_stride)
        row += ROWS
    left = rows - row
    if left == 3:
        _strip_3(advance(a, row * a_stride), a_stride, b, b_stride, depth, advance(c, row * c_stride), c_stride)
    elif left == 2:
        _strip_2(advance(a, row * a_stride), a_stride, b, b_stride, depth, advance(c, row * c_stride), c_stride)
    elif left == 1:
        _strip_1(advance(a, row * a_stride), a_stride, b, b_stride, depth, advance(c, row * c_stride), c_stride)
