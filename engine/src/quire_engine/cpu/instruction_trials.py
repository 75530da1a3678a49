"""A program that runs single instructions on known numbers and reports after each whether the result was correct.

``python -m quire_engine.cpu.instruction_trials NAME…`` may die of any of them: ``findings`` reads its last output. LLVM
assembles the instructions, as it does for our kernels. The program needs neither torch nor numba.
"""

import array
import ctypes
import signal
import struct
import sys
from collections.abc import Callable
from dataclasses import dataclass

from quire_engine.cpu.limits import Trial

_V4 = "+avx512f,+avx512bw,+avx512cd,+avx512dq,+avx512vl"
_ARCH_PRCTL, _REQUEST_PERMISSION, _TILE_DATA = 158, 0x1023, 18
_MOST_SECONDS = 120


@dataclass(frozen=True, slots=True, kw_only=True)
class Instructions:
    """Instructions with three operands in memory: ``$0`` the sums, ``$1`` and ``$2`` the factors.

    ``$3`` is the stride of a tile's rows and ``$4`` its configuration.
    """

    features: str
    assembly: str
    sums: bytes
    left: bytes
    right: bytes
    expected: bytes


def _vectors(product: str, *, width: str = "zmm") -> str:
    loads = "\n".join(f"vmovups (${place}), %{width}{place}" for place in range(3))
    return f"{loads}\n{product}\nvmovups %{width}0, ($0)\nvzeroupper"


def _floats(values: list[float]) -> bytes:
    return array.array("f", values).tobytes()


def _halves(values: list[float]) -> bytes:
    return struct.pack(f"<{len(values)}e", *values)


def _bfloat16s(values: list[float]) -> bytes:
    """Return the upper halves of values that are exact in bfloat16."""
    packed = _floats(values)
    return b"".join(packed[place + 2 : place + 4] for place in range(0, len(packed), 4))


def _fused(width: int) -> tuple[bytes, bytes, bytes, bytes]:
    sums = [float(lane) for lane in range(width)]
    left, right = [lane + 1.0 for lane in range(width)], [0.5 * lane - 3.0 for lane in range(width)]
    expected = [total + a * b for total, a, b in zip(sums, left, right, strict=True)]
    return _floats(sums), _floats(left), _floats(right), _floats(expected)


def _avx2() -> Instructions:
    sums, left, right, expected = _fused(8)
    # The sum is a product of floats plus zero added to its bits, which uses the integer unit as well.
    product = "vfmadd231ps %ymm2, %ymm1, %ymm0\nvpxor %ymm1, %ymm1, %ymm1\nvpaddd %ymm1, %ymm0, %ymm0"
    return Instructions(
        features="",
        assembly=_vectors(product, width="ymm"),
        sums=sums,
        left=left,
        right=right,
        expected=expected,
    )


def _avx512() -> Instructions:
    sums, left, right, expected = _fused(16)
    # One instruction of each part: F, DQ (64-bit product), CD (leading zeros), BW (bytes), VL (masked ymm).
    product = "\n".join(
        (
            "vfmadd231ps %zmm2, %zmm1, %zmm0",
            "vpxord %zmm1, %zmm1, %zmm1",
            "vpmullq %zmm1, %zmm1, %zmm2",
            "vplzcntd %zmm0, %zmm3",
            "vpaddb %zmm1, %zmm0, %zmm0",
            "kxnorw %k1, %k1, %k1",
            "vmovaps %ymm0, %ymm4 {%k1} {z}",
            "vporq %zmm2, %zmm0, %zmm0",
        )
    )
    return Instructions(features=_V4, assembly=_vectors(product), sums=sums, left=left, right=right, expected=expected)


def _byte_products(instruction: str, *, features: str, width: str) -> Instructions:
    lanes = 16 if width == "zmm" else 8
    left = [(7 * place) % 256 for place in range(4 * lanes)]
    right = [(5 * place) % 255 - 127 for place in range(4 * lanes)]
    sums = list(range(lanes))
    expected = [
        total + sum(left[4 * lane + byte] * right[4 * lane + byte] for byte in range(4))
        for lane, total in enumerate(sums)
    ]
    return Instructions(
        features=features,
        assembly=_vectors(f"{instruction} %{width}2, %{width}1, %{width}0", width=width),
        sums=array.array("i", sums).tobytes(),
        left=bytes(left),
        right=array.array("b", right).tobytes(),
        expected=array.array("i", expected).tobytes(),
    )


def _pair_products() -> Instructions:
    left, right = [float(place % 9 - 4) for place in range(32)], [float(place % 7 - 3) for place in range(32)]
    sums = [float(lane) for lane in range(16)]
    expected = [
        total + left[2 * lane] * right[2 * lane] + left[2 * lane + 1] * right[2 * lane + 1]
        for lane, total in enumerate(sums)
    ]
    return Instructions(
        features=f"{_V4},+avx512bf16",
        assembly=_vectors("vdpbf16ps %zmm2, %zmm1, %zmm0"),
        sums=_floats(sums),
        left=_bfloat16s(left),
        right=_bfloat16s(right),
        expected=_floats(expected),
    )


def _half_products() -> Instructions:
    sums = [float(lane) for lane in range(32)]
    left, right = [float(lane % 9 - 4) for lane in range(32)], [float(lane % 7 - 3) for lane in range(32)]
    expected = [total + a * b for total, a, b in zip(sums, left, right, strict=True)]
    return Instructions(
        features=f"{_V4},+avx512fp16",
        assembly=_vectors("vfmadd231ph %zmm2, %zmm1, %zmm0"),
        sums=_halves(sums),
        left=_halves(left),
        right=_halves(right),
        expected=_halves(expected),
    )


_TILES = """ldtilecfg ($4)
tileloadd ($0,$3,1), %tmm0
tileloadd ($1,$3,1), %tmm1
tileloadd ($2,$3,1), %tmm2
{product} %tmm2, %tmm1, %tmm0
tilestored %tmm0, ($0,$3,1)
tilerelease"""


def _tile_of_pairs() -> Instructions:
    left = [[float((row + k) % 9 - 4) for k in range(32)] for row in range(16)]
    right = [[float((3 * column + k) % 7 - 3) for k in range(32)] for column in range(16)]
    expected = [sum(a * b for a, b in zip(x, y, strict=True)) + 1.0 for x in left for y in right]
    pairs = [right[column][2 * pair + part] for pair in range(16) for column in range(16) for part in range(2)]
    return Instructions(
        features=f"{_V4},+amx-tile,+amx-bf16",
        assembly=_TILES.format(product="tdpbf16ps"),
        sums=_floats([1.0] * 256),
        left=_bfloat16s([value for row in left for value in row]),
        right=_bfloat16s(pairs),
        expected=_floats(expected),
    )


def _tile_of_bytes() -> Instructions:
    left = [[(7 * row + k) % 256 for k in range(64)] for row in range(16)]
    right = [[(5 * column + 3 * k) % 255 - 127 for k in range(64)] for column in range(16)]
    expected = [sum(a * b for a, b in zip(x, y, strict=True)) + 1 for x in left for y in right]
    groups = [right[column][4 * group + byte] for group in range(16) for column in range(16) for byte in range(4)]
    return Instructions(
        features=f"{_V4},+amx-tile,+amx-int8",
        assembly=_TILES.format(product="tdpbusd"),
        sums=array.array("i", [1] * 256).tobytes(),
        left=bytes(value for row in left for value in row),
        right=array.array("b", groups).tobytes(),
        expected=array.array("i", expected).tobytes(),
    )


TRIALS: dict[Trial, Callable[[], Instructions]] = {
    "avx2": _avx2,
    "avx-vnni": lambda: _byte_products("{vex} vpdpbusd", features="+avxvnni", width="ymm"),
    "avx512": _avx512,
    "avx512-vnni": lambda: _byte_products("vpdpbusd", features=f"{_V4},+avx512vnni", width="zmm"),
    "avx512-bf16": _pair_products,
    "avx512-fp16": _half_products,
    "amx-bf16": _tile_of_pairs,
    "amx-int8": _tile_of_bytes,
}


def run_trial(trial: Trial) -> str:
    """Run the instructions, and return ``ok`` or the error. The process may die of them."""
    if trial.startswith("amx") and not _tiles_are_permitted():
        return "Linux does not permit the use of tiles"
    wanted = TRIALS[trial]()
    sums = ctypes.create_string_buffer(wanted.sums, len(wanted.sums))
    _run(wanted, sums)
    return "ok" if sums.raw == wanted.expected else "wrong results"


def _run(wanted: Instructions, sums: "ctypes.Array[ctypes.c_char]") -> None:
    from llvmlite import binding

    binding.initialize_native_target()
    binding.initialize_native_asmprinter()
    binding.initialize_native_asmparser()
    target = binding.Target.from_default_triple()
    machine = target.create_target_machine(cpu="x86-64-v3", features=wanted.features, jit=True)
    module = binding.parse_assembly(_function(wanted.assembly))
    with binding.create_mcjit_compiler(module, machine) as engine:
        engine.finalize_object()
        run = ctypes.CFUNCTYPE(None, *[ctypes.c_void_p] * 2, *[ctypes.c_void_p] * 3)(
            engine.get_function_address("trial")
        )
        left, right, configuration = (
            ctypes.create_string_buffer(data, len(data)) for data in (wanted.left, wanted.right, _tile_configuration())
        )
        run(
            ctypes.addressof(sums), ctypes.addressof(left), ctypes.addressof(right), 64, ctypes.addressof(configuration)
        )


def _function(assembly: str) -> str:
    """Return the LLVM text of a function around the assembly, which may use any register."""
    text = assembly.replace("\n", "\\0A")
    used = [f"~{{xmm{number}}}" for number in range(16)]
    clobbers = ",".join((*used, "~{memory}", "~{dirflag}", "~{fpsr}", "~{flags}"))
    pointers = "ptr %sums, ptr %left, ptr %right, i64 %stride, ptr %configuration"
    return (
        f"define void @trial({pointers}) {{\n"
        f'  call void asm sideeffect "{text}", "r,r,r,r,r,{clobbers}"({pointers})\n'
        "  ret void\n}\n"
    )


def _tile_configuration() -> bytes:
    """Return palette 1 with eight tiles of 16 rows of 64 bytes."""
    return struct.pack("<BB14x8H16x8B8x", 1, 0, *[64] * 8, *[16] * 8)


def _tiles_are_permitted() -> bool:
    call = ctypes.CDLL(None).syscall
    call.restype = ctypes.c_long
    return bool(call(_ARCH_PRCTL, _REQUEST_PERMISSION, _TILE_DATA) == 0)


def main(names: list[str]) -> int:
    signal.alarm(_MOST_SECONDS)  # The alarm also ends the process when its parent no longer waits for it.
    for name in names:
        print("begin", name, flush=True)
        print("end", name, run_trial(name), flush=True)  # type: ignore[arg-type]
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
