"""The capacity of a machine: the minimum of the hardware and the container's limits."""

import os
from pathlib import Path

import pytest

from quire_cli.local.machine import this_machine, with_tried_cpu

ALLOWED = len(os.sched_getaffinity(0))


def put(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


@pytest.mark.parametrize(
    ("files", "cpus"),
    [
        ({}, ALLOWED),
        ({"sys/fs/cgroup/cpu.max": "max 100000\n"}, ALLOWED),
        ({"sys/fs/cgroup/cpu.max": "100000 100000\n"}, 1),
        ({"sys/fs/cgroup/cpu.max": "50000 100000\n"}, 1),
        ({"sys/fs/cgroup/cpu.max": "nonsense"}, ALLOWED),
        ({"sys/fs/cgroup/cpu/cpu.cfs_quota_us": "-1\n", "sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000"}, ALLOWED),
        ({"sys/fs/cgroup/cpu/cpu.cfs_quota_us": "100000", "sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000"}, 1),
    ],
)
def test_cpus(tmp_path: Path, files: dict[str, str], cpus: int) -> None:
    assert this_machine(put(tmp_path, files)).cpus == cpus


@pytest.mark.parametrize(
    ("limit", "expected"),
    [
        ({}, 8 * 2**30),
        ({"sys/fs/cgroup/memory.max": "max"}, 8 * 2**30),
        ({"sys/fs/cgroup/memory.max": str(2**30)}, 2**30),
        ({"sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712"}, 8 * 2**30),
        ({"sys/fs/cgroup/memory/memory.limit_in_bytes": str(2**31)}, 2**31),
    ],
)
def test_memory(tmp_path: Path, limit: dict[str, str], expected: int) -> None:
    meminfo = {"proc/meminfo": f"MemTotal: {8 * 2**20} kB\nMemFree: 1 kB\n"}
    assert this_machine(put(tmp_path, {**meminfo, **limit})).memory_bytes == expected


@pytest.mark.parametrize(("flags", "fast"), [("fpu avx2", False), ("fpu avx512_bf16", True), ("amx_bf16", True)])
def test_fast_bfloat16(tmp_path: Path, flags: str, fast: bool) -> None:
    machine = this_machine(put(tmp_path, {"proc/cpuinfo": f"model name\t: X\nflags\t\t: {flags}\n"}))
    assert machine.multiplies_bfloat16 is fast


@pytest.mark.parametrize(
    ("says", "cpu", "fast"),
    [
        ("""echo '{"sentence": "level avx2", "multiplies_bfloat16": false}'""", "level avx2", False),
        ("echo null", None, True),
        ("echo nonsense", None, True),
        ("exit 2", None, True),
    ],
)
async def test_cpu_of_the_machine_equals_engine_detection(
    tmp_path: Path, says: str, cpu: str | None, fast: bool
) -> None:
    engine = tmp_path / "engine"
    engine.write_text(f'#!/bin/sh\n[ "$1" = --cpu-report ] || exit 3\n{says}\n')
    engine.chmod(0o755)
    machine = this_machine(put(tmp_path, {"proc/cpuinfo": "flags\t\t: fpu avx512_bf16\n"}))
    found = await with_tried_cpu(machine, [str(engine)])
    assert (found.cpu, found.multiplies_bfloat16) == (cpu, fast)
    assert await with_tried_cpu(machine, [str(tmp_path / "missing")]) == machine


def test_gpus_of_amd_are_those_of_its_driver(tmp_path: Path) -> None:
    cards = {
        "sys/class/drm/card0/device/vendor": "0x1002\n",
        "sys/class/drm/card0/device/mem_info_vram_total": "206141652992\n",
        "sys/class/drm/card1/device/vendor": "0x1a03\n",
        "sys/class/drm/card2/device/vendor": "0x1002\n",
        "sys/class/drm/card2/device/mem_info_vram_total": "much\n",
    }
    assert this_machine(put(tmp_path, cards)).amd_memory_bytes == (206141652992,)


def test_gpus_are_read_from_nvidia_smi(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    smi = tmp_path / "nvidia-smi"
    smi.write_text("#!/bin/sh\necho 81559\necho 40960\n")
    smi.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert this_machine(tmp_path).gpu_memory_bytes == (81559 * 2**20, 40960 * 2**20)
    smi.write_text("#!/bin/sh\necho 'Failed to initialize NVML'\nexit 9\n")
    assert this_machine(tmp_path).gpu_memory_bytes == ()
    monkeypatch.setenv("PATH", str(tmp_path / "nowhere"))
    assert this_machine(tmp_path).gpu_memory_bytes == ()
