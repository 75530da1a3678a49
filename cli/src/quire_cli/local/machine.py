"""The machine of a run: CPUs and memory within the container's limits, GPUs, and the installed commands of quire."""

import asyncio
import json
import math
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from quire_cli.errors import StartProblem
from quire_cli.local.process import watched_output
from quire_common.contract.engine import ENGINE_COMMAND, FETCH_COMMAND
from quire_common.contract.gateway import GATEWAY_COMMAND

_MIB = 2**20
_NVIDIA_SMI_SECONDS = 10
_AMD_VENDOR = "0x1002"
_CPU_REPORT_SECONDS = 300


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    cpus: int
    memory_bytes: int
    """All of it, whatever else runs: what a person counts on when writing a percentage."""
    gpu_memory_bytes: tuple[int, ...]
    """One entry per GPU of NVIDIA."""
    amd_memory_bytes: tuple[int, ...] = ()
    """One entry per GPU of AMD."""
    multiplies_bfloat16: bool
    """The CPU has AVX512-BF16 or AMX; others convert, a hundred times slower."""
    cpu: str | None = None
    """The level of the CPU's instructions that works, and what is left out; None where no engine said so."""


def this_machine(root: Path = Path("/")) -> Machine:
    """Look at ``/proc`` and ``/sys`` below ``root``, and ask nvidia-smi."""
    cgroup = root / "sys/fs/cgroup"
    return Machine(
        cpus=_cpus(cgroup),
        memory_bytes=_memory_bytes(root, cgroup),
        gpu_memory_bytes=_gpus(),
        amd_memory_bytes=_amd_gpus(root / "sys/class/drm"),
        multiplies_bfloat16=_multiplies_bfloat16(root / "proc/cpuinfo"),
    )


async def with_tried_cpu(machine: Machine, engine: Sequence[str]) -> Machine:
    """Return the machine with what the engine found out about its CPU; unchanged where the engine does not say.

    engine  the engine's command, which tries the CPU's instructions where no earlier start has
    """
    try:
        async with asyncio.timeout(_CPU_REPORT_SECONDS):
            report = json.loads(await watched_output([*engine, "--cpu-report"]))
        return replace(machine, cpu=str(report["sentence"]), multiplies_bfloat16=bool(report["multiplies_bfloat16"]))
    except (OSError, subprocess.SubprocessError, ValueError, KeyError, TypeError):
        return machine


def _cpus(cgroup: Path) -> int:
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    words = _words(cgroup / "cpu.max")
    if not words:
        words = _words(cgroup / "cpu/cpu.cfs_quota_us") + _words(cgroup / "cpu/cpu.cfs_period_us")
    match words:
        case [quota, period] if quota.isdecimal() and period.isdecimal() and int(period) > 0:
            return max(1, min(allowed, math.floor(int(quota) / int(period))))
    return max(1, allowed)


def _memory_bytes(root: Path, cgroup: Path) -> int:
    total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    for line in _lines(root / "proc/meminfo"):
        match line.split():
            case ["MemTotal:", kibibytes, "kB"]:
                total = int(kibibytes) * 1024
    limits = _words(cgroup / "memory.max") + _words(cgroup / "memory/memory.limit_in_bytes")
    return min([total, *(int(limit) for limit in limits if limit.isdecimal() and int(limit) > 0)])


def _multiplies_bfloat16(cpuinfo: Path) -> bool:
    for line in _lines(cpuinfo):
        if line.startswith("flags"):
            return not {"avx512_bf16", "amx_bf16"}.isdisjoint(line.split())
    return False


def _gpus() -> tuple[int, ...]:
    """Memory of each GPU; none where nvidia-smi is missing or finds none."""
    command = shutil.which("nvidia-smi")
    if command is None:
        return ()
    query = [command, "--query-gpu=memory.total", "--format=csv,noheader,nounits"]
    try:
        answer = subprocess.run(query, capture_output=True, text=True, timeout=_NVIDIA_SMI_SECONDS, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ()
    figures = answer.stdout.split() if answer.returncode == 0 else []
    return tuple(int(mebibytes) * _MIB for mebibytes in figures if mebibytes.isdecimal())


def _amd_gpus(drm: Path) -> tuple[int, ...]:
    """Return the memory of each GPU that AMD's driver shows in ``/sys``."""
    devices = sorted(drm.glob("card[0-9]*/device/mem_info_vram_total"))
    figures = [_words(path) for path in devices if _words(path.with_name("vendor")) == [_AMD_VENDOR]]
    return tuple(int(words[0]) for words in figures if words and words[0].isdecimal())


def _words(path: Path) -> list[str]:
    return " ".join(_lines(path)).split()


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text(errors="replace").splitlines()
    except OSError:
        return []


@dataclass(frozen=True, slots=True, kw_only=True)
class Commands:
    engine: tuple[str, ...]
    gateway: tuple[str, ...]


def installed_commands() -> Commands:
    """Return the commands next to this Python, else those on PATH; raise StartProblem."""
    return Commands(engine=(installed(ENGINE_COMMAND),), gateway=(installed(GATEWAY_COMMAND),))


def installed(name: str) -> str:
    """Return the path of a command, which is next to this Python or on PATH. Raises StartProblem."""
    own = Path(sys.executable).with_name(name)
    found = str(own) if own.exists() else shutil.which(name)
    if found is None:
        distribution = "quire-engine" if name == FETCH_COMMAND else name
        hint = f"install it next to quire: pip install {distribution} (or make setup, in a clone of the repository)"
        raise StartProblem(f"the command {name} is not installed", hint=hint)
    return found
