"""The child processes of an engine server, by what they run."""

from pathlib import Path

_ENGINE = "quire_engine.ipc.loop"
_RENDERING = "quire_engine.api.rendering_worker"


def engine_process(server: int) -> int:
    """Return the id of the engine process of a server."""
    (pid,) = _children(server, _ENGINE)
    return pid


def rendering_processes(server: int) -> list[int]:
    """Return the ids of the processes that render chat templates."""
    return _children(server, _RENDERING)


def _children(server: int, module: str) -> list[int]:
    pids = Path(f"/proc/{server}/task/{server}/children").read_text().split()
    return [int(pid) for pid in pids if module in Path(f"/proc/{pid}/cmdline").read_text().split("\0")]
