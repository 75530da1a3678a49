"""The table of memory that a start-up logs."""

from dataclasses import replace

import pytest

from quire_engine.runner.cache_size import CacheSize
from quire_engine.runner.start_report import MemoryUse, StartReport, report_lines, shown

GIB, MIB = 1 << 30, 1 << 20
ON_CPU = StartReport(
    device="the CPU",
    weights=300 * MIB,
    weights_held_as="bf16",
    cache=CacheSize(
        num_blocks=(2048, 100), num_swap_blocks=(0, 0), max_model_len=8192, kv_cache_bytes=4 * GIB, sequences=4
    ),
    cache_dtype="bfloat16",
    block_size=16,
    swap_space=0,
    max_num_batched_tokens=2048,
)


def test_cpu_report_has_only_known_values() -> None:
    assert report_lines(ON_CPU) == [
        "memory of the CPU:",
        "  weights   300.0 MiB  bf16",
        "  KV cache   4.00 GiB  bfloat16: 2,048 + 100 blocks of 16 tokens, for 4 sequences of 8,192 tokens at once",
    ]


def test_speed_follows_memory_where_it_is_known() -> None:
    report = replace(ON_CPU, cpu="level avx2", threads="2", arithmetic=("float32 by onednn float32", "times"))
    lines = report_lines(report)
    assert lines[lines.index("speed of the CPU:") + 1 :] == [
        "  CPU         level avx2",
        "  threads     2",
        "  arithmetic  float32 by onednn float32",
        "              times",
    ]


def test_gpu_report_accounts_for_all_memory() -> None:
    memory = MemoryUse(
        activations=GIB,
        graphs=200 * MIB,
        graph_sizes=(1, 2, 256),
        mixed_graph_sizes=(64, 1024),
        before=GIB // 2,
        free=3 * GIB,
    )
    lines = report_lines(replace(ON_CPU, device="NVIDIA H100", swap_space=8 * GIB, memory=memory))
    assert lines[0] == "memory of NVIDIA H100:"
    assert [line[2:14].strip() for line in lines[1:]] == [
        "weights",
        "KV cache",
        "swap space",
        "activations",
        "CUDA graphs",
        "taken before",
        "free",
    ]
    assert len({line.index("iB") for line in lines[1:]}) == 1, "sizes stand in one column"
    assert "3 decode, up to 256 sequences; 2 mixed, up to 1,024 tokens" in lines[5]


def test_report_shows_none_without_graphs() -> None:
    assert any(line.endswith("0.0 MiB  none") for line in report_lines(replace(ON_CPU, memory=MemoryUse(graphs=0))))


def test_report_says_why_ranks_have_no_graphs() -> None:
    lines = report_lines(replace(ON_CPU, ranks=2, memory=MemoryUse(graphs=0), no_graphs="steps run launch by launch"))
    assert any("CUDA graphs" in line and line.endswith("none  steps run launch by launch") for line in lines)


@pytest.mark.parametrize(("size", "text"), [(0, "0.0 MiB"), (GIB - 1, "1024.0 MiB"), (GIB, "1.00 GiB")])
def test_sizes(size: int, text: str) -> None:
    assert shown(size) == text
