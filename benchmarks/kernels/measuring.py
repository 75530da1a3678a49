"""The measurement of each case: comparison with the reference first, then its time, then its peers.

A case that a kernel rejects, that gives wrong results or runs out of memory becomes a row with the reason, and the
other cases continue.
"""

import gc
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from benchmarks.kernels.gpu_timing import Card, Timer, Timing
from benchmarks.kernels.kernel_cases import Case, Prepared, Verdict, compare, gist
from quire_kernels.errors import KernelError


@dataclass(frozen=True, kw_only=True)
class Peer:
    """The result of a peer. ``ratio`` is its time over ours: above 1, ours is faster."""

    seconds: float | None = None
    ratio: float | None = None
    error: float | None = None
    failed: str | None = None


@dataclass(frozen=True, kw_only=True)
class Row:
    """One case's result; ``failed`` is the reason if there is no time."""

    op: str
    case: str
    seconds: float | None = None
    fastest_seconds: float | None = None
    calls: int = 0
    bytes_per_second: float = 0.0
    flops: float = 0.0
    bandwidth_share: float | None = None
    gemm_share: float | None = None
    error: float | None = None
    bound: float | None = None
    failed: str | None = None
    wrong: bool = False
    peers: dict[str, Peer] = field(default_factory=dict)


def measure(case: Case, device: torch.device, dtype: torch.dtype, timer: Timer | None, card: Card | None) -> Row:
    """Return the row of a case; without a timer, only the results are compared."""
    torch.manual_seed(20250711)
    try:
        return _measure(case, device, dtype, timer, card)
    except (KernelError, torch.OutOfMemoryError) as error:
        return Row(op=case.op, case=case.name, failed=gist(error))
    # A kernel's launch fails in many ways (compiler, driver); none may affect the cases after it.
    except Exception as error:
        return Row(op=case.op, case=case.name, failed=gist(error), wrong=True)
    finally:
        gc.collect()
        if device.type == "cuda":
            torch.cuda.empty_cache()


def _measure(case: Case, device: torch.device, dtype: torch.dtype, timer: Timer | None, card: Card | None) -> Row:
    prepared = case.prepare(device, dtype)
    expected = prepared.expected()
    found = prepared.result() if prepared.result is not None else prepared.compared(prepared.call())
    verdict = compare(prepared, found, expected)
    outcome: dict[str, Any] = {"op": case.op, "case": case.name, "error": verdict.error, "bound": verdict.bound}
    if not verdict.holds:
        return Row(**outcome, failed=_wrong(verdict), wrong=True)
    if timer is None or card is None:
        return Row(**outcome)
    timing = timer.time(prepared.call)
    peers = {name: _measure_peer(call, prepared, expected, timer, timing) for name, call in prepared.peers.items()}
    return Row(**outcome, **_speeds(prepared, timing, card, dtype), peers=peers)


def _speeds(prepared: Prepared, timing: Timing, card: Card, dtype: torch.dtype) -> dict[str, Any]:
    per_second, flops = prepared.bytes / timing.median, prepared.flops / timing.median
    gemm = card.gemm_flops.get(str(dtype).removeprefix("torch."))
    return {
        "seconds": timing.median,
        "fastest_seconds": timing.fastest,
        "calls": timing.calls,
        "bytes_per_second": per_second,
        "flops": flops,
        "bandwidth_share": per_second / card.read_bytes_per_second,
        "gemm_share": flops / gemm if gemm else None,
    }


def _measure_peer(call: Callable[[], object], prepared: Prepared, expected: Any, timer: Timer, ours: Timing) -> Peer:
    try:
        returned = call()
        error = None
        if prepared.compare_peers:
            verdict = compare(prepared, prepared.compared(returned), expected)
            if not verdict.holds:
                return Peer(failed=_wrong(verdict), error=verdict.error)
            error = verdict.error
        seconds = timer.time(call).median
    # Other libraries' kernels reject shapes in their own ways.
    except Exception as problem:
        return Peer(failed=gist(problem))
    return Peer(seconds=seconds, ratio=seconds / ours.median, error=error)


def _wrong(verdict: Verdict) -> str:
    return f"wrong: error {verdict.error:.2g}, at most {verdict.bound:.2g} is allowed"
