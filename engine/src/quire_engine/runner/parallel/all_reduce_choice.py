"""The choice of how the GPUs of a tensor group add: by NCCL or over symmetric memory. A pure decision on their times.

A step's sums [T, H] are small while sequences decode, and then NCCL's time is mostly latency. Three kernels of torch do
the same in one launch over memory that all GPUs of the group can read:

- one-shot: each GPU reads the whole of all others;
- two-shot: each GPU reads and adds a share of all others, and then reads the sums of the other shares;
- multicast: the same, where the NVSwitch adds and sends.

All ranks decide on the times of all, so that they choose alike: a sum by two ways at once would never end.

Legend: T tokens, H hidden size.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

Way = Literal["one-shot", "two-shot", "multicast"]
WAYS: tuple[Way, ...] = ("one-shot", "two-shot", "multicast")
TOKENS = (1, 8, 32, 64, 128, 256)
"""The numbers of tokens that are timed; the symmetric buffer holds the largest. NCCL adds larger steps."""
RANKS = (2, 4, 8)
"""The sizes of groups for which torch's kernels add in the order of ranks, and so give the same bits on all GPUs."""
DTYPES = ("bfloat16", "float32")
"""The types for which torch has the kernels."""
ALIGNMENT = 16
"""The bytes that a thread of the kernels loads at once."""
_WORTH_LEAVING = 1.03
"""The factor by which a way must be faster than NCCL, because times differ from run to run."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AllReduceFacts:
    """The facts that decide whether symmetric memory is tried."""

    disabled: bool
    in_order: bool
    """True if sums must have one order at all sizes (``--deterministic``)."""
    on_one_node: bool
    device_type: str
    hip: str | None
    """The version of HIP; None for CUDA and CPUs."""
    ranks: int
    """The size of the tensor group."""
    dtype: str
    torch_version: str
    has_memory: bool
    """True if this torch has symmetric memory whose ranks meet by NCCL."""


def refusal(facts: AllReduceFacts) -> str | None:
    """Return why symmetric memory is not tried, or None."""
    if facts.disabled:
        return "is turned off by --disable-custom-all-reduce"
    if facts.in_order:
        return "is not used with --deterministic, whose sums have one order at all sizes"
    if facts.device_type != "cuda" or facts.hip is not None:
        return "is for GPUs of NVIDIA"
    if not facts.on_one_node:
        return "needs all GPUs of a stage on one node"
    if facts.ranks not in RANKS:
        return f"has kernels for 2, 4 and 8 GPUs, and the group has {facts.ranks}"
    if facts.dtype not in DTYPES:
        return f"has kernels for {' and '.join(DTYPES)}, and the model computes in {facts.dtype}"
    if not facts.has_memory:
        return f"needs torch 2.13 or newer, and this is {facts.torch_version}"
    return None


@dataclass(frozen=True, slots=True, kw_only=True)
class AllReduceTimes:
    """One rank's microseconds per sum, by number of tokens as in ``tokens``."""

    tokens: tuple[int, ...]
    nccl: tuple[float, ...]
    ways: dict[Way, tuple[float, ...]]


def slowest(ranks: Sequence[AllReduceTimes]) -> AllReduceTimes:
    """Return the longest times over all ranks: a sum ends when it has ended everywhere."""
    first = ranks[0]
    return AllReduceTimes(
        tokens=first.tokens,
        nccl=_longest([one.nccl for one in ranks]),
        ways={way: _longest([one.ways[way] for one in ranks]) for way in WAYS if way in first.ways},
    )


def _longest(columns: Sequence[Sequence[float]]) -> tuple[float, ...]:
    return tuple(max(row) for row in zip(*columns, strict=True))


def fastest(times: AllReduceTimes) -> tuple[Way | None, ...]:
    """Return the way to use by number of tokens; None is NCCL."""
    chosen: list[Way | None] = []
    for place, nccl in enumerate(times.nccl):
        best = min(times.ways, key=lambda way: times.ways[way][place], default=None)
        worth = best is not None and times.ways[best][place] * _WORTH_LEAVING < nccl
        chosen.append(best if worth else None)
    return tuple(chosen)


@dataclass(frozen=True, slots=True, kw_only=True)
class WaysBySize:
    """The ways by the size of a sum; None is NCCL."""

    sizes: tuple[int, ...]
    """The largest bytes of each way, in ascending order."""
    ways: tuple[Way | None, ...]

    def way(self, num_bytes: int) -> Way | None:
        """Return the way for a sum of so many bytes, which must be the same on all ranks."""
        if num_bytes == 0 or num_bytes % ALIGNMENT:
            return None
        for size, way in zip(self.sizes, self.ways, strict=True):
            if num_bytes <= size:
                return way
        return None


def in_words(times: AllReduceTimes, chosen: Sequence[Way | None]) -> str:
    """Return the choice and its times, for the start report."""
    parts = []
    for place, (tokens, way) in enumerate(zip(times.tokens, chosen, strict=True)):
        nccl = times.nccl[place]
        shown = min((column[place] for column in times.ways.values()), default=nccl)
        name = "NCCL" if way is None else way
        parts.append(f"{tokens}: {nccl:.0f} and {shown:.0f}, {name} ({nccl / max(shown, 1e-3):.1f}×)")
    if not any(chosen):
        return f"sums of ranks by NCCL (µs of NCCL and of symmetric memory by tokens: {'; '.join(parts)})"
    return f"sums of ranks over symmetric memory (µs of NCCL and of it by tokens: {'; '.join(parts)}; above: NCCL)"
