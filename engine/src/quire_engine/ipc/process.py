"""One engine process and its socket: how it is started, used and ended. The supervisor decides about restarts.

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
from quire_engine.errors import GROUP_LOST
from quire_engine.ipc.messages import FromEngine, RunnerFactory, StartUp, ToEngine

_STDERR = 2

_CACHED_KERNELS = 320
"""oneDNN compiles a kernel of half a MiB for each shape of weight and number of tokens, and by default keeps 1024 of
them: more than half a GiB once steps of every size have run. Compiling one again takes about a millisecond."""

# About 150 microseconds: the parallel regions of a step are closer together than that.
_SPINS = "10000"


def compute_environment(threads: int, environment: Mapping[str, str], cpu: CpuLimits | None = None) -> dict[str, str]:
    """Return the environment of an engine process, which thread pools and libraries read when torch loads.

    Waiting threads spin for a moment and then sleep, or sleep at once: ``runner.waiting`` changes that at run time,
    which needs a passive policy.
    """
    count = str(threads)
    return {
        # oneDNN's own cache, and that of torch's wrapper around it, which would keep evicted kernels alive.
        "ONEDNN_PRIMITIVE_CACHE_CAPACITY": str(_CACHED_KERNELS),
        "LRU_CACHE_CAPACITY": str(_CACHED_KERNELS),
        # torch would print the calls inside its code for every connection to another node that fails.
        "TORCH_CPP_LOG_LEVEL": "ERROR",
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
    """An engine process that was started and loads by itself; its messages wait in the socket until they are read.

    Created by ``spawn``; leaving its context ends the process.
    """

    child: "subprocess.Popen[bytes]"
    context: "zmq.Context[zmq.Socket[bytes]]"
    socket: "zmq.Socket[bytes]"
    folder: Path
    """The folder of the socket's file."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.child.kill()
        self.release()
        self.child.wait()

    def release(self) -> None:
        """Release everything except the process."""
        assert self.child.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self.child.stdin.close()
        self.context.destroy(linger=0)
        self.unlink()

    def unlink(self) -> None:
        """Remove the socket's file, which is not needed once the process is connected."""
        shutil.rmtree(self.folder, ignore_errors=True)


@dataclass(frozen=True, slots=True)
class Ended:
    """The end of a process, by its exit status; a negative status is a signal's number."""

    status: int

    @property
    def illegal_instruction(self) -> bool:
        """True if the CPU refused an instruction."""
        return self.status == -signal.SIGILL

    @property
    def reason(self) -> str:
        """The reason of the end as text."""
        if self.status == GROUP_LOST:
            return "the engine process ended, because it lost another rank of its group"
        if self.status >= 0:
            return f"the engine process ended with exit status {self.status}; its messages are above"
        name = signal.Signals(-self.status).name
        hint = ", as the kernel does to one that takes too much memory" if self.status == -signal.SIGKILL else ""
        return f"the engine process was killed by {name}{hint}"


class EngineProcess:
    """A running engine process within an event loop; call ``end`` in any case."""

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
        """Send a message without waiting; the process must be connected, that is, have sent a message."""
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
        """Kill the process if it still runs, and release all its resources."""
        self._spawned.child.kill()
        await asyncio.shield(self._status)
        self._socket.close(linger=0)
        self._spawned.release()


def _tell_the_end(child: "subprocess.Popen[bytes]", status: "asyncio.Future[int]") -> None:
    code = child.wait()

    def tell() -> None:
        if not status.done():
            status.set_result(code)

    with contextlib.suppress(RuntimeError):  # The loop is closed; there is no waiter any more.
        status.get_loop().call_soon_threadsafe(tell)


def spawn(config: EngineConfig, factory: RunnerFactory) -> Spawned:
    """Start an engine process. Raise OSError if that is impossible."""
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
        raise OSError(f"cannot create a socket in {folder}: {error}; set TMPDIR to another folder") from None
    began = monotonic()
    try:
        child = subprocess.Popen(
            # Modules of the working directory are not imported.
            (sys.executable, "-P", "-m", "quire_engine.ipc.loop"),
            stdin=subprocess.PIPE,
            stdout=_STDERR,
            env=compute_environment(config.threads, os.environ, config.cpu),
        )
    except BaseException:  # This includes Ctrl-C.
        context.destroy(linger=0)
        shutil.rmtree(folder, ignore_errors=True)
        raise
    assert child.stdin is not None
    with contextlib.suppress(BrokenPipeError):  # The process has already ended; its status gives the reason.
        child.stdin.write(StartUp(address=address, began=began, config=config, factory=factory).encode())
        child.stdin.flush()
    return Spawned(child=child, context=context, socket=socket, folder=folder)
