"""The worker that runs a chain of launches, one after the other; see ``recording``."""

from typing import Any

from llvmlite import ir
from numba import carray, types
from numba.extending import intrinsic

from quire_kernels.cpu_runtime.scalars import as_int64_pointer, int64_pointer

_I32, _I64 = ir.IntType(32), ir.IntType(64)
_BYTES = ir.IntType(8).as_pointer()
_FIELDS = 3
"""The numbers of a launch: the addresses of its worker, of its argument block, and of the number of its threads."""


@intrinsic
def _run(typingctx: Any, enter: Any, worker: Any, block: Any, threads: Any) -> Any:
    """Run a worker on one thread, or on several in a parallel region, if ``enter`` is the address of one."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        enter, worker, block, threads = args
        given = builder.inttoptr(block, _BYTES)
        body = ir.FunctionType(ir.VoidType(), [_BYTES]).as_pointer()
        several = builder.icmp_signed(">", threads, ir.Constant(_I64, 1))
        exists = builder.icmp_signed("!=", enter, ir.Constant(_I64, 0))
        with builder.if_else(builder.and_(several, exists)) as (together, alone):
            with together:
                region = ir.FunctionType(ir.VoidType(), [_BYTES, _BYTES, _I32, _I32]).as_pointer()
                count, flags = builder.trunc(threads, _I32), ir.Constant(_I32, 0)
                builder.call(builder.inttoptr(enter, region), [builder.inttoptr(worker, _BYTES), given, count, flags])
            with alone:
                builder.call(builder.inttoptr(worker, body), [given])
        return context.get_dummy_value()

    return types.void(*(types.int64,) * 4), codegen


HEAD = 9
"""The numbers of a chain's block before its launches."""


def chain_worker(block: Any) -> None:
    """Run the launches of a block, ``passes`` times; stop after a pass in which one of them failed.

    The block contains [1] the number of launches, [2] that of passes, [3] the address of GOMP_parallel, [4] and [5] the
    addresses of the launches' argument blocks before and while they run, [6] the numbers of all of these together, [7]
    the address of the places of error codes among them, [8] the number of these, [``HEAD``:] the launches.
    """
    head = carray(as_int64_pointer(block), HEAD)
    a = carray(as_int64_pointer(block), HEAD + head[1] * _FIELDS)
    first, now = carray(int64_pointer(a[4]), a[6]), carray(int64_pointer(a[5]), a[6])
    codes = carray(int64_pointer(a[7]), a[8])
    for _ in range(a[2]):
        now[:] = first
        for launch in range(a[1]):
            place = HEAD + launch * _FIELDS
            _run(a[3], a[place], a[place + 1], carray(int64_pointer(a[place + 2]), 1)[0])
        for code in codes:
            if now[code] != 0:
                return
