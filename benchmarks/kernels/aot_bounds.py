"""The resources that compiled kernels may use, and the check of these bounds. It needs no Triton.

The bounds are in ``aot_bounds.json``, by op, case and target: registers rounded up to the allocation unit of eight,
shared memory to whole KiB, stack and local bytes exactly. The file is for both Triton versions that quire supports: it
is created with one and widened with the other.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

FILE = Path(__file__).with_name("aot_bounds.json")
FIELDS = ("registers", "stack_bytes", "local_bytes", "shared_bytes")
# The maximum for a block: CUDA programming guide, table of technical specifications by compute capability; AMD's
# instruction set documents of CDNA 3, CDNA 4 and RDNA 3 (LDS).
SHARED_LIMITS = {
    "sm_80": 163 << 10,
    "sm_86": 99 << 10,
    "sm_89": 99 << 10,
    "sm_90": 227 << 10,
    "sm_100": 227 << 10,
    "sm_120": 99 << 10,
    "gfx942": 64 << 10,
    "gfx950": 160 << 10,
    "gfx1100": 64 << 10,
}
NO_SPILL_TARGETS = ("sm_90", "gfx942", "gfx950")
"""The targets on which the decode path may use neither stack nor local memory."""

Usage = Mapping[str, int]
Bounds = dict[str, dict[str, dict[str, dict[str, int]]]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """One case on one target: its resources, or the reason why it does not compile."""

    op: str
    case: str
    target: str
    """Such as "sm_90" or "gfx942"."""
    decode_path: bool
    usage: Usage | None = None
    error: str | None = None
    programs_per_sm: int = 1
    """The programs that the launch expects on one multiprocessor at once."""
    resident_programs: int = 1
    """The programs that fit there by registers and shared memory."""

    def __str__(self) -> str:
        return f"{self.op}: {self.case}: {self.target}"


def complaints(measured: list[Measured], bounds: Bounds) -> list[str]:
    """Return all violations; an empty list if everything is within its bounds."""
    found = [complaint for one in measured for complaint in _complaints_of(one, bounds)]
    known = {(one.op, one.case) for one in measured}
    ops = {one.op for one in measured}
    for op in sorted(ops & bounds.keys()):
        found += [
            f"{op}: {case}: has bounds, but is no case any more" for case in bounds[op] if (op, case) not in known
        ]
    return found


def _complaints_of(one: Measured, bounds: Bounds) -> list[str]:
    if one.usage is None:
        return [one.error or f"{one}: was not compiled"]
    found = []
    limit = SHARED_LIMITS.get(one.target)
    if limit is not None and one.usage["shared_bytes"] > limit:
        found.append(f"{one}: takes {one.usage['shared_bytes']:,} bytes of shared memory; a block there has {limit:,}")
    if one.decode_path and one.target in NO_SPILL_TARGETS:
        for field in ("stack_bytes", "local_bytes"):
            if one.usage[field]:
                found.append(f"{one}: {field} is {one.usage[field]}; the decode path must have none on {one.target}")
    if one.resident_programs < one.programs_per_sm:
        found.append(
            f"{one}: {one.resident_programs} programs fit on a multiprocessor, and its launch expects "
            f"{one.programs_per_sm}"
        )
    bound = bounds.get(one.op, {}).get(one.case, {}).get(one.target)
    if bound is None and bounds and one.target not in _bounded_targets(bounds):
        return found
    if bound is None:
        return [*found, f"{one}: has no bounds yet; `make kernels-aot-bounds` writes them"]
    for field in FIELDS:
        if one.usage[field] > bound[field]:
            found.append(f"{one}: {field} is {one.usage[field]:,}; its bound is {bound[field]:,}")
    return found


def _bounded_targets(bounds: Bounds) -> set[str]:
    """Return the targets that have bounds; another target has none."""
    return {target for cases in bounds.values() for targets in cases.values() for target in targets}


def bound_of(usage: Usage) -> dict[str, int]:
    return {
        "registers": -(-usage["registers"] // 8) * 8,
        "stack_bytes": usage["stack_bytes"],
        "local_bytes": usage["local_bytes"],
        "shared_bytes": -(-usage["shared_bytes"] // 1024) * 1024,
    }


def updated(bounds: Bounds, measured: list[Measured], *, widen: bool) -> Bounds:
    """Return the bounds that fit the measurements; ``widen`` keeps wider old ones. Other ops stay unchanged."""
    result = {op: cases for op, cases in bounds.items() if op not in {one.op for one in measured}}
    for one in measured:
        old = bounds.get(one.op, {}).get(one.case, {})
        targets = result.setdefault(one.op, {}).setdefault(one.case, {k: v for k, v in old.items() if k != one.target})
        if one.usage is None:
            continue
        bound = bound_of(one.usage)
        if widen and one.target in old:
            bound = {field: max(bound[field], old[one.target][field]) for field in FIELDS}
        targets[one.target] = bound
    return result


def read(path: Path = FILE) -> Bounds:
    content: Any = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    return content


def _place(target: str) -> tuple[bool, int]:
    """Return the order of targets: NVIDIA's before AMD's, and each by its number."""
    return target.startswith("gfx"), int(target.removeprefix("sm_").removeprefix("gfx"))


def write(bounds: Bounds, path: Path = FILE) -> None:
    """Write one line per case and target, so that diffs are readable."""
    ops = []
    for op, cases in sorted(bounds.items()):
        lines = []
        for case, targets in sorted(cases.items()):
            ordered = sorted(targets.items(), key=lambda item: _place(item[0]))
            of_targets = ",\n".join(f"   {json.dumps(target)}: {json.dumps(bound)}" for target, bound in ordered)
            lines.append(f"  {json.dumps(case)}: {{\n{of_targets}\n  }}")
        ops.append(f" {json.dumps(op)}: {{\n" + ",\n".join(lines) + "\n }")
    path.write_text("{\n" + ",\n".join(ops) + "\n}\n", encoding="utf-8")
