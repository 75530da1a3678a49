"""The start report: memory and speed after the start-up, as a few log lines that form tables."""

from collections.abc import Iterator
from dataclasses import dataclass

from quire_engine.runner.cache_size import CacheSize

_GIB, _MIB = 1 << 30, 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryUse:
    """The use of the device's memory, in bytes. A None is unknown or does not apply, and gets no line."""

    activations: int | None = None
    graphs: int | None = None
    graph_sizes: tuple[int, ...] = ()
    """Numbers of decoding sequences."""
    mixed_graph_sizes: tuple[int, ...] = ()
    """Numbers of tokens."""
    before: int | None = None
    """The bytes used on the device before this process loaded anything."""
    free: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class StartReport:
    """The facts of the report; sizes are in bytes. A None does not apply, and gets no line."""

    device: str
    weights: int
    weights_held_as: str
    ranks: int = 1
    """The processes that run the model together; ``weights`` and ``cache`` are those of one."""
    all_weights: int = 0
    """The bytes of the weights of all ranks."""
    cache: CacheSize
    cache_dtype: str
    block_size: int
    swap_space: int
    memory: MemoryUse = MemoryUse()
    max_num_batched_tokens: int
    no_graphs: str | None = None
    """The reason why steps of a GPU run launch by launch."""
    cpu: str | None = None
    """The level of the CPU and the unused features."""
    arithmetic: tuple[str, ...] = ()
    """The arithmetic of the model, and the times of all candidates."""
    threads: str = ""


def report_lines(report: StartReport) -> list[str]:
    rows = list(_rows(report))
    names, sizes = max(len(row.name) for row in rows), max(len(row.size) for row in rows)
    return [
        f"memory of {report.device}:",
        *(f"  {row.name:{names}}  {row.size:>{sizes}}  {row.remark}".rstrip() for row in rows),
        *_speed(report),
    ]


def _speed(report: StartReport) -> Iterator[str]:
    rows = [("CPU", report.cpu), ("threads", report.threads)]
    rows += [("arithmetic" if place == 0 else "", line) for place, line in enumerate(report.arithmetic)]
    if told := [(name, line) for name, line in rows if line]:
        yield f"speed of {report.device}:"
        yield from (f"  {name:10}  {line}" for name, line in told)


@dataclass(frozen=True, slots=True)
class _ReportRow:
    name: str
    size: str
    remark: str = ""


def _rows(report: StartReport) -> Iterator[_ReportRow]:
    cache, memory = report.cache, report.memory
    blocks = " + ".join(f"{count:,}" for count in cache.num_blocks)
    together = f", of {shown(report.all_weights)} on {report.ranks} ranks" if report.ranks > 1 else ""
    yield _ReportRow("weights", shown(report.weights), report.weights_held_as + together)
    yield _ReportRow(
        "KV cache",
        shown(cache.kv_cache_bytes),
        f"{report.cache_dtype}: {blocks} blocks of {report.block_size} tokens, for {cache.sequences:,} sequences of"
        f" {cache.max_model_len:,} tokens at once",
    )
    if report.swap_space:
        yield _ReportRow("swap space", shown(report.swap_space), "host memory")
    if memory.activations is not None:
        tokens = f"{report.max_num_batched_tokens:,}"
        yield _ReportRow("activations", shown(memory.activations), f"measured in a step of {tokens} tokens")
    if report.no_graphs is not None:
        yield _ReportRow("CUDA graphs", "none", report.no_graphs)
    elif memory.graphs is not None:
        kinds = (("decode", memory.graph_sizes, "sequences"), ("mixed", memory.mixed_graph_sizes, "tokens"))
        few = [f"{len(sizes)} {kind}, up to {sizes[-1]:,} {unit}" for kind, sizes, unit in kinds if sizes]
        yield _ReportRow("CUDA graphs", shown(memory.graphs), "; ".join(few) or "none")
    if memory.before is not None:
        yield _ReportRow("taken before", shown(memory.before), "CUDA itself, and other processes")
    if memory.free is not None:
        yield _ReportRow("free", shown(memory.free))


def shown(size: int) -> str:
    return f"{size / _GIB:.2f} GiB" if size >= _GIB else f"{size / _MIB:.1f} MiB"
