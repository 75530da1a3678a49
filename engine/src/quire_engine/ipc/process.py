"""One engine process, and the socket to it: started, spoken to, ended. Whether to start another is not decided here.

``spawn`` needs no event loop: the first process loads torch while the API process loads its own libraries.
"""

import asyncio
import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from time import monotonic
from typing import Self

import msgspec
import zmq
import zmq.asyncio

from quire_engine.config import EngineConfig
from quire_engine.cpu.limits import CpuLimits
from quire_engine.ipc import start_up
from quire_engine.ipc.messages import FromEngine, ToEngine

_STDERR = 2

_CACHED_KERNELS = 320
"""oneDNN compiles a kernel, of half a MiB, for each shape of weight and number of tokens, and keeps 1024 of them: more
than half a GiB once steps of every size have run. Compiling one anew takes about a millisecond."""

# About 150 microseconds: the regions of a step are less apart.
_SPINS = "10000"


def compute_environment(threads: int, environment: Mapping[str, str], cpu: CpuLimits | None = None) -> dict[str, str]:
    """Return the environment of an engine process, which thread pools and libraries read as torch loads.

    Waiting threads spin for a moment and then sleep, or sleep at once: ``runner.waiting`` changes that as it runs,
    which takes a passive policy.
    """
    count = str(threads)
    return {
        # oneDNN's own cache, and that of torch's wrapper around it, which keeps alive what the other forgets.
        "ONEDNN_PRIMITIVE_CACHE_CAPACITY": str(_CACHED_KERNELS),
        "LRU_CACHE_CAPACITY": str(_CACHED_KERNELS),
        **environment,
        **({} if cpu is None else cpu.environment),
        "OMP_NUM_THREADS": count,
        "MKL_NUM_THREADS": count,
        "OPENBLAS_NUM_THREADS": count,
        "NUMBA_NUM_THREADS": count,
        "OMP_WAIT_POLICY": "PASSIVE",
        "GOMP_SPINCOUNT": _SPINS,
        "KMP_BLOCKTIME": "0",
    }


@dataclass(frozen=True, slots=True, kw_only=True)
class Spawned:
    """An engine process that was begun and loads by itself; what it says waits in the socket until somebody follows it.

    Made by ``spawn``; leaving its context ends it, followed or not.
    """

    child: "subprocess.Popen[bytes]"
    context: "zmq.Context[zmq.Socket[bytes]]"
    socket: "zmq.Socket[bytes]"
    folder: Path
    """Of the socket's name."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.child.kill()
        self.release()
        self.child.wait()

    def release(self) -> None:
        """Everything but the process."""
        assert self.child.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self.child.stdin.close()
        self.context.destroy(linger=0)
        self.unlink()

    def unlink(self) -> None:
        """Remove the socket's name: once the process is connected nobody else needs it."""
        shutil.rmtree(self.folder, ignore_errors=True)


@dataclass(frozen=True, slots=True)
class Ended:
    """The end of a process, by its exit status; a signal's number below zero."""

    status: int

    @property
    def illegal_instruction(self) -> bool:
        """Whether the CPU refused an instruction."""
        return self.status == -signal.SIGILL

    @property
    def reason(self) -> str:
        """The end in words."""
        if self.status >= 0:
            return f"the engine process ended with exit status {self.status}; its own words are above"
        name = signal.Signals(-self.status).name
        hint = ", as the kernel does to one that takes too much memory" if self.status == -signal.SIGKILL else ""
        return f"the engine process was killed by {name}{hint}"


class EngineProcess:
    """Follows a process from within an event loop; ``end`` it in any case."""

    def __init__(self, spawned: Spawned) -> None:
        self._spawned = spawned
        self._socket = zmq.asyncio.Socket.shadow(spawned.socket)
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder = msgspec.msgpack.Decoder(FromEngine)
        self._status: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        threading.Thread(target=_tell_the_end, args=(spawned.child, self._status), name="engine", daemon=True).start()

    @property
    def pid(self) -> int:
        return self._spawned.child.pid

    def send(self, message: ToEngine) -> None:
        """Never waits; to be called once the process has said something, that is, is connected."""
        self._socket.send(self._encoder.encode(message))

    async def receive(self) -> FromEngine:
        message: FromEngine = self._decoder.decode(await self._socket.recv())
        return message

    def unlink(self) -> None:
        self._spawned.unlink()

    async def ended(self) -> Ended:
        """Wait for the end of the process, and return how it ended."""
        return Ended(await asyncio.shield(self._status))

    async def end(self) -> None:
        """Kill what still runs, and leave nothing behind."""
        self._spawned.child.kill()
        await asyncio.shield(self._status)
        self._socket.close(linger=0)
        self._spawned.release()


def _tell_the_end(child: "subprocess.Popen[bytes]", status: "asyncio.Future[int]") -> None:
    code = child.wait()

    def tell() -> None:
        if not status.done():
            status.set_result(code)

    with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits any more
        status.get_loop().call_soon_threadsafe(tell)


def spawn(config: EngineConfig, factory: start_up.RunnerFactory) -> Spawned:
    """Begins an engine process. Raises OSError where none can be started."""
    folder = Path(tempfile.mkdtemp(prefix="quire-"))
    address = f"ipc://{folder}/engine"
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    socket = context.socket(zmq.DEALER)
    socket.set(zmq.SNDHWM, 0)
    socket.set(zmq.RCVHWM, 0)
    try:
        socket.bind(address)
    except zmq.ZMQError as error:
        context.destroy(linger=0)
        folder.rmdir()
        raise OSError(f"no socket can be made in {folder}, which TMPDIR can change: {error}") from None
    began = monotonic()
    try:
        child = subprocess.Popen(
            # Nothing of the working directory is imported.
            (sys.executable, "-P", "-m", "quire_engine.ipc.loop"),
            stdin=subprocess.PIPE,
            stdout=_STDERR,
            env=compute_environment(config.threads, os.environ, config.cpu),
        )
    except BaseException:  # Ctrl-C as well
        context.destroy(linger=0)
        shutil.rmtree(folder, ignore_errors=True)
        raise
    assert child.stdin is not None
    with contextlib.suppress(BrokenPipeError):  # it has ended already, and that is told by its status
        child.stdin.write(
            start_up.encode(start_up.StartUp(address=address, began=began, config=config, factory=factory))
        )
        child.stdin.flush()
    return Spawned(child=child, context=context, socket=socket, folder=folder)
