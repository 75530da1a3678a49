"""The results of all turns: medians, ratios of quire to its peers, and whether they meet the goals. Pure."""

import statistics
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

from benchmarks.serving.comparison.workloads import Workload
from quire_engine.cpu.limits import CpuLevel

Family = Literal["quire", "quire-int8", "vllm", "llama.cpp", "transformers"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """One workload in one turn. A latency without streaming has no value."""

    workload: Workload
    requests: int
    seconds: float
    total_tokens_per_second: float
    output_tokens_per_second: float
    ttft_p50_seconds: float | None = None
    itl_p50_seconds: float | None = None
    tpot_p50_seconds: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """One server in one run: started, measured, stopped. ``problem`` is the reason if it was not."""

    server: str
    family: Family
    run: int
    start_seconds: float | None
    peak_rss_bytes: int | None
    measured: tuple[Measured, ...]
    problem: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """Medians of one server on one workload over the runs."""

    server: str
    family: Family
    workload: Workload
    runs: int
    total_tokens_per_second: float
    spread: tuple[float, float]
    """The minimum and maximum total tokens per second of a run."""
    output_tokens_per_second: float
    ttft_seconds: float | None
    itl_seconds: float | None
    tpot_seconds: float | None
    start_seconds: float | None
    peak_rss_bytes: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """One goal: the value found, and the required one. If ``at_least`` is False, it is an upper bound."""

    what: str
    found: float
    goal: float
    at_least: bool = True

    @property
    def met(self) -> bool:
        return self.found >= self.goal if self.at_least else self.found <= self.goal


def rows(turns: Sequence[Turn]) -> list[Row]:
    """Return the rows in the order in which servers and workloads first occurred."""
    found: dict[tuple[str, Workload], list[tuple[Turn, Measured]]] = {}
    for turn in turns:
        for measured in turn.measured:
            found.setdefault((turn.server, measured.workload), []).append((turn, measured))
    return [_row(together) for together in found.values()]


def _row(together: Sequence[tuple[Turn, Measured]]) -> Row:
    turn, first = together[0]

    def median(value: Callable[[Turn, Measured], float | None]) -> float | None:
        values = [found for each in together if (found := value(*each)) is not None]
        return statistics.median(values) if values else None

    totals = [measured.total_tokens_per_second for _, measured in together]
    return Row(
        server=turn.server,
        family=turn.family,
        workload=first.workload,
        runs=len(together),
        total_tokens_per_second=statistics.median(totals),
        spread=(min(totals), max(totals)),
        output_tokens_per_second=statistics.median(m.output_tokens_per_second for _, m in together),
        ttft_seconds=median(lambda _, m: m.ttft_p50_seconds),
        itl_seconds=median(lambda _, m: m.itl_p50_seconds),
        tpot_seconds=median(lambda _, m: m.tpot_p50_seconds),
        start_seconds=median(lambda t, _: t.start_seconds),
        peak_rss_bytes=median(lambda t, _: t.peak_rss_bytes),
    )


def run_ratios(turns: Sequence[Turn], ours: str, theirs: str, workload: Workload) -> list[float]:
    """Return the total tokens per second of ``ours`` over ``theirs`` in each run.

    The two are neighbours in time, so other load on the machine affects both.
    """
    by_run: dict[int, dict[str, float]] = {}
    for turn in turns:
        for measured in turn.measured:
            if measured.workload == workload:
                by_run.setdefault(turn.run, {})[turn.server] = measured.total_tokens_per_second
    return [both[ours] / both[theirs] for both in by_run.values() if ours in both and theirs in both and both[theirs]]


def vllm_goal(workload: Workload, *, level: CpuLevel) -> float:
    """Return the goal for total tokens per second over vLLM's: less if vLLM is itself near the floor."""
    if workload == Workload(input_tokens=256, output_tokens=64, concurrency=16):
        return 1.1
    if level == "amx" and workload == Workload(input_tokens=1024, output_tokens=128, concurrency=8):
        return 2.5
    return 1.3


LLAMA_CPP_GOAL, INT8_GOAL, START_GOAL = 2.0, 1.8, 0.2


def verdicts(turns: Sequence[Turn], *, level: CpuLevel, ours: str = "quire") -> list[Verdict]:
    """Return every goal to which these turns apply."""
    table = rows(turns)
    found: list[Verdict] = []
    for row in (each for each in table if each.server == ours):
        for peer in (each for each in table if each.workload == row.workload and each.family in ("vllm", "llama.cpp")):
            found += _against(turns, row, peer, level=level)
    found += _int8(turns, table)
    found += _starts(table, ours)
    return found


def _against(turns: Sequence[Turn], row: Row, peer: Row, *, level: CpuLevel) -> list[Verdict]:
    goal = LLAMA_CPP_GOAL if peer.family == "llama.cpp" else vllm_goal(row.workload, level=level)
    name = f"{row.workload}: {{}} over {peer.server}"
    ratios = run_ratios(turns, row.server, peer.server, row.workload)
    found = [Verdict(what=name.format("total tokens/s"), found=statistics.median(ratios), goal=goal)] if ratios else []
    for what, own, other in (
        ("TTFT", row.ttft_seconds, peer.ttft_seconds),
        ("ITL", row.itl_seconds, peer.itl_seconds),
    ):
        if own and other:
            found.append(Verdict(what=name.format(what), found=own / other, goal=1.0, at_least=False))
    return found


def _int8(turns: Sequence[Turn], table: Sequence[Row]) -> list[Verdict]:
    """Compare with the fastest of vLLM's variants on each workload."""
    found = []
    for row in (each for each in table if each.family == "quire-int8"):
        rivals = [each for each in table if each.family == "vllm" and each.workload == row.workload]
        if not rivals:
            continue
        best = max(rivals, key=lambda each: each.total_tokens_per_second)
        if ratios := run_ratios(turns, row.server, best.server, row.workload):
            what = f"{row.workload}: total tokens/s with int8 over {best.server}"
            found.append(Verdict(what=what, found=statistics.median(ratios), goal=INT8_GOAL))
    return found


def _starts(table: Sequence[Row], ours: str) -> list[Verdict]:
    starts = {row.server: row.start_seconds for row in table if row.start_seconds}
    peers = {row.server for row in table if row.family == "vllm" and row.server in starts}
    if ours not in starts:
        return []
    return [
        Verdict(
            what=f"start to first token over {peer}",
            found=(starts[ours] or 0.0) / (starts[peer] or 1.0),
            goal=START_GOAL,
            at_least=False,
        )
        for peer in sorted(peers)
    ]


def as_document(turns: Sequence[Turn]) -> list[dict[str, Any]]:
    """Return plain values for JSON, with workloads as they are written on the command line."""
    return [
        asdict(turn) | {"measured": [asdict(m) | {"workload": str(m.workload)} for m in turn.measured]}
        for turn in turns
    ]
