"""The machine of a comparison: its processor, with the features that affect speed, and its other load."""

import os
import platform
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

from benchmarks.report import usable_cpus

_FEATURES = ("avx2", "avx512f", "avx512_vnni", "avx512_bf16", "avx_vnni", "amx_bf16", "amx_int8")


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    processor: str
    cpus: int
    features: tuple[str, ...]
    memory_gib: float
    load_average: float
    python: str
    quire: str

    def __str__(self) -> str:
        return (
            f"{self.processor}, {self.cpus} CPUs with {' '.join(self.features) or 'none of ' + ' '.join(_FEATURES)},"
            f" {self.memory_gib:.0f} GiB; Python {self.python}, quire {self.quire};"
            f" load average at the start {self.load_average:.1f}"
        )


def this_machine() -> Machine:
    told = _cpuinfo()
    pages = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    flags = told.get("flags", "").split()
    return Machine(
        processor=told.get("model name", platform.processor() or platform.machine()),
        cpus=len(usable_cpus()),
        features=tuple(feature for feature in _FEATURES if feature in flags),
        memory_gib=pages / 2**30,
        load_average=os.getloadavg()[0],
        python=platform.python_version(),
        quire=version("quire-engine"),
    )


def _cpuinfo() -> dict[str, str]:
    """Return the fields of the first processor."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").split("\n\n")[0].splitlines()
    except OSError:
        return {}
    return {key.strip(): value.strip() for key, _, value in (line.partition(":") for line in lines)}
