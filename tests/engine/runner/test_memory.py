"""The available memory, from simulated /proc and /sys trees."""

from pathlib import Path

import pytest

from quire_engine.runner.memory import AvailableMemory, available_memory

GIB = 1 << 30


def tree(root: Path, files: dict[str, str]) -> dict[str, Path]:
    for name, content in files.items():
        file = root / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(content)
    return {"proc": root / "proc", "cgroup_root": root / "sys"}


MACHINE = {"proc/meminfo": f"MemTotal: {16 * GIB // 1024} kB\nMemAvailable:    {8 * GIB // 1024} kB\n"}
UNLIMITED = {"sys/memory.max": "max\n", "sys/memory.current": str(GIB)}


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        (MACHINE, AvailableMemory(size=8 * GIB, is_own=False)),
        ({**MACHINE, **UNLIMITED}, AvailableMemory(size=8 * GIB, is_own=False)),
        (
            {**MACHINE, "sys/memory.max": str(4 * GIB), "sys/memory.current": str(GIB)},
            AvailableMemory(size=3 * GIB, is_own=True),
        ),
        (  # pages of the mapped checkpoint can be freed
            {
                **MACHINE,
                "sys/memory.max": str(4 * GIB),
                "sys/memory.current": str(3 * GIB),
                "sys/memory.stat": f"anon 5\ninactive_file {GIB}\nactive_file {GIB}\n",
            },
            AvailableMemory(size=3 * GIB, is_own=True),
        ),
        (  # a limit above the own cgroup applies as well
            {
                **MACHINE,
                "proc/self/cgroup": "0::/pods/engine\n",
                "sys/pods/memory.max": str(2 * GIB),
                "sys/pods/memory.current": str(GIB),
                "sys/pods/engine/memory.max": str(6 * GIB),
                "sys/pods/engine/memory.current": "0",
            },
            AvailableMemory(size=GIB, is_own=True),
        ),
        (
            {
                **MACHINE,
                "sys/memory/memory.limit_in_bytes": str(2 * GIB),
                "sys/memory/memory.usage_in_bytes": str(GIB),
            },
            AvailableMemory(size=GIB, is_own=True),
        ),
        (  # a limit above the machine's available memory has no effect
            {**MACHINE, "sys/memory.max": str(64 * GIB), "sys/memory.current": "0"},
            AvailableMemory(size=8 * GIB, is_own=False),
        ),
        (
            {**MACHINE, "sys/memory.max": str(GIB), "sys/memory.current": str(2 * GIB)},
            AvailableMemory(size=0, is_own=True),
        ),
        ({}, None),
    ],
)
def test_lowest_limit_of_machine_and_cgroups_applies(
    tmp_path: Path, files: dict[str, str], expected: AvailableMemory | None
) -> None:
    assert available_memory(**tree(tmp_path, files)) == expected
