"""Exact counts of quire's own code: functions entered, bytecodes executed, C functions called.

In addition: torch's operators, numba's compilations, page faults, and Python's allocations. Each counter observes one
call of ``work`` on this thread.
"""

import gc
import resource
import sys
import tracemalloc
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType
from typing import Any

Work = Callable[[], object]


@dataclass(frozen=True, slots=True, kw_only=True)
class PythonCost:
    instructions: int
    calls: Counter[str]
    """The functions entered, by module and name."""

    def calls_in(self, *packages: str) -> int:
        return sum(count for name, count in self.calls.items() if name.startswith(packages))


def python_cost(work: Work) -> PythonCost:
    """Return the cost of quire's modules; a coroutine counts as entered each time that it continues."""
    instructions = 0
    calls: Counter[str] = Counter()

    def on_call(frame: FrameType, event: str, argument: Any) -> Any:
        module = str(frame.f_globals.get("__name__", ""))
        if not _is_ours(module):
            return None
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        calls[f"{module}.{frame.f_code.co_name}"] += 1
        return on_opcode

    def on_opcode(frame: FrameType, event: str, argument: Any) -> Any:
        nonlocal instructions
        instructions += event == "opcode"
        return on_opcode

    with _hook(sys.gettrace, sys.settrace, on_call):
        work()
    return PythonCost(instructions=instructions, calls=calls)


def native_calls(work: Work) -> int:
    """Return the C functions called from quire's modules."""
    count = 0

    def on_event(frame: FrameType, event: str, argument: Any) -> None:
        nonlocal count
        if event == "c_call" and _is_ours(str(frame.f_globals.get("__name__", ""))):
            count += 1

    with _hook(sys.getprofile, sys.setprofile, on_event):
        work()
    return count


def torch_operators(work: Work) -> Counter[str]:
    """Return the operators that reach a kernel of torch, by name."""
    from torch.utils._python_dispatch import TorchDispatchMode

    found: Counter[str] = Counter()

    class Mode(TorchDispatchMode):
        def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            found[str(function)] += 1
            return function(*args, **(kwargs or {}))

    with Mode():
        work()
    return found


def compilations(work: Work) -> int:
    """Return how often numba's compiler is entered."""
    from numba.core import event

    with event.install_recorder("numba:compiler_lock") as recorder:
        work()
    return len(recorder.buffer)


def page_faults(work: Work) -> int:
    """Return the pages that the kernel gave this process."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    work()
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before


@dataclass(frozen=True, slots=True, kw_only=True)
class Allocated:
    kept_blocks: int
    """Additional pieces of memory that stay allocated."""
    peak_bytes: int
    """The largest additional memory at any time."""


def allocated(work: Work) -> Allocated:
    """Return the allocations by Python and numpy."""
    gc.collect()
    tracemalloc.start()
    try:
        work()  # caches that fill at the first use are not measured
        gc.collect()
        before, blocks = tracemalloc.get_traced_memory()[0], _blocks()
        tracemalloc.reset_peak()
        work()
        peak = tracemalloc.get_traced_memory()[1]
        gc.collect()
        return Allocated(kept_blocks=_blocks() - blocks, peak_bytes=peak - before)
    finally:
        tracemalloc.stop()


def _blocks() -> int:
    own = tracemalloc.Filter(False, tracemalloc.__file__)
    snapshot = tracemalloc.take_snapshot().filter_traces((own, tracemalloc.Filter(False, __file__)))
    return sum(statistic.count for statistic in snapshot.statistics("filename"))


def _is_ours(module: str) -> bool:
    return module.startswith(("quire_engine", "quire_kernels"))


@contextmanager
def _hook(get: Callable[[], Any], set_hook: Callable[[Any], None], hook: Any) -> Iterator[None]:
    """Set a hook, but not during a garbage collection, whose finalizers would count."""
    before = get()
    gc.collect()
    gc.disable()
    set_hook(hook)
    try:
        yield
    finally:
        set_hook(before)
        gc.enable()
