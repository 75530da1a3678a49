"""The resident memory of every process of the servers, by what it runs."""

import os
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from benchmarks.serving.soak.servers import Fleet

_ENGINE = "quire_engine.ipc.loop"


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    role: str
    """The kind of process: gateway, API process, engine process or worker."""
    pid: int
    seconds: float
    """The time since the start of the soak."""
    mib: float


def sample(fleet: Fleet, seconds: float) -> Iterator[Sample]:
    """Yield the memory of each process that runs now."""
    for server in fleet.servers:
        is_gateway = server is fleet.gateway
        yield from _of("gateway" if is_gateway else "API process", server.pid, seconds)
        for pid in _children(server.pid):
            with suppress(OSError):
                is_engine = _ENGINE in Path(f"/proc/{pid}/cmdline").read_text().split("\0")
                yield from _of("engine process" if is_engine else "worker", pid, seconds)


def _children(pid: int) -> list[int]:
    children = []
    with suppress(OSError):
        for task in Path(f"/proc/{pid}/task").iterdir():
            children += (task / "children").read_text().split()
    return [int(child) for child in children]


def _of(role: str, pid: int, seconds: float) -> Iterator[Sample]:
    with suppress(OSError, IndexError):  # it has just ended
        pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
        yield Sample(role=role, pid=pid, seconds=seconds, mib=pages * os.sysconf("SC_PAGE_SIZE") / 2**20)
