#!/usr/bin/env python3
"""Count the instructions of the inner loops of a kernel compiled for an NVIDIA GPU, which need not be present.

Print, for each innermost loop, its instructions, and those that multiply matrices or convert numbers. The cases are
those of `make kernels-aot`.
"""

import argparse
import re
from collections import Counter

_LINE = re.compile(r"\s+/\*([0-9a-f]{4,})\*/\s+(?:@!?U?P[\dT]+\s+)?([A-Z0-9]+)(.*?);")
_TARGET = re.compile(r"0x([0-9a-f]+)\s*$")


def inner_loops(disassembly: str) -> list[Counter[str]]:
    """Return the instructions of each innermost loop, by name, in order."""
    lines = [(int(found[1], 16), found[2], found[3]) for found in map(_LINE.match, disassembly.splitlines()) if found]
    loops = []
    for place, name, rest in lines:
        target = _TARGET.search(rest)
        if name == "BRA" and target is not None and int(target[1], 16) < place:
            loops.append((int(target[1], 16), place))
    innermost = [
        (begin, end)
        for begin, end in sorted(loops)
        if not any(begin <= first and last <= end and (first, last) != (begin, end) for first, last in loops)
    ]
    return [Counter(name for place, name, _ in lines if begin <= place <= end) for begin, end in innermost]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--op", default="paged_attention", help="default: %(default)s")
    parser.add_argument("--case", nargs="+", default=["split bf16 d128 g4"], help="default: %(default)s")
    parser.add_argument("--target", default="sm_90", help="default: %(default)s")
    arguments = parser.parse_args()
    from quire_kernels.triton_runtime.aot_compile import cases_of, disassemble
    from quire_kernels.triton_runtime.target import Target

    target = Target.named(arguments.target)
    cases = {case.name: case for case in cases_of(arguments.op, target)}
    if unknown := [name for name in arguments.case if name not in cases]:
        raise SystemExit(f"--case: there is no {', '.join(unknown)}; there are {', '.join(cases)}")
    for name in arguments.case:
        print(name)
        for loop in inner_loops(disassemble(arguments.op, cases[name], target)):
            products = sum(count for instruction, count in loop.items() if "MMA" in instruction)
            print(f"  {loop.total()} instructions, {products} products, {loop['F2F']} F2F, {loop['F2FP']} F2FP")


if __name__ == "__main__":
    main()
