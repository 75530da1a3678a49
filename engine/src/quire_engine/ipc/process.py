"""One engine process, and the socket to it: started, spoken to, ended. Whether to start another is not decided here."""

import asyncio
import contextlib
import os
import shutil
import signal
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path

import msgspec
import zmq
import zmq.asyncio

from quire_engine.config import EngineConfig
from quire_engine.ipc import start_up
from quire_engine.ipc.messages import FromEngine, ToEngine

_STDERR = 2

_CACHED_KERNELS = 320
"""oneDNN compiles a kernel, of half a MiB, for each shape of weight and number of tokens, and keeps 1024 of them: more
than half a GiB once steps of every size have run. Compiling one anew takes about a millisecond."""

# About 150 microseconds: the regions of a step are less apart.
_SPINS = "10000"


def compute_environment(threads: int, environment: Mapping[str, str]) -> dict[str, str]:
    """The environment of an engine process. Thread pools read it as torch loads, so it is set before the process is.

    Waiting threads spin for a moment and then sleep, or sleep at once: ``runner.waiting`` changes that as it runs,
    which takes a passive policy.
    """
    count = str(threads)
    return {
        # oneDNN's own cache, and that of torch's wrapper around it, which keeps alive what the other forgets.
        "ONEDNN_PRIMITIVE_CACHE_CAPACITY": str(_CACHED_KERNELS),
        "LRU_CACHE_CAPACITY": str(_CACHED_KERNELS),
        **environment,
        "OMP_NUM_THREADS": count,
        "MKL_NUM_THREADS": count,
        "OPENBLAS_NUM_THREADS": count,
        "NUMBA_NUM_THREADS": count,
        "OMP_WAIT_POLICY": "PASSIVE",
        "GOMP_SPINCOUNT": _SPINS,
        "KMP_BLOCKTIME": "0",
    }


class EngineProcess:
    """Made by ``start_process``; ``end`` it in any case."""

    def __init__(self, child: asyncio.subprocess.Process, socket: zmq.asyncio.Socket, folder: Path) -> None:
        self._child = child
        self._socket = socket
        self._folder = folder
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder = msgspec.msgpack.Decoder(FromEngine)

    @property
    def pid(self) -> int:
        return self._child.pid

    def send(self, message: ToEngine) -> None:
        """Never waits; to be called once the process has said something, that is, is connected."""
        self._socket.send(self._encoder.encode(message))

    async def receive(self) -> FromEngine:
        message: FromEngine = self._decoder.decode(await self._socket.recv())
        return message

    def unlink(self) -> None:
        """Remove the socket's name: once the process is connected nobody else needs it."""
        shutil.rmtree(self._folder, ignore_errors=True)

    async def ended(self) -> str:
        """Waits for the end of the process; how it ended."""
        status = await self._child.wait()
        if status >= 0:
            return f"the engine process ended with exit status {status}; its own words are above"
        name = signal.Signals(-status).name
        hint = ", as the kernel does to one that takes too much memory" if status == -signal.SIGKILL else ""
        return f"the engine process was killed by {name}{hint}"

    async def end(self) -> None:
        """Kill what still runs, and leave nothing behind."""
        with contextlib.suppress(ProcessLookupError):
            self._child.kill()
        assert self._child.stdin is not None
        self._child.stdin.close()
        await self._child.wait()
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            await self._child.stdin.wait_closed()
        self._socket.close(linger=0)
        self.unlink()


async def start_process(
    context: zmq.asyncio.Context, config: EngineConfig, factory: start_up.RunnerFactory
) -> EngineProcess:
    folder = Path(tempfile.mkdtemp(prefix="quire-"))
    address = f"ipc://{folder}/engine"
    socket = context.socket(zmq.DEALER)
    socket.set(zmq.SNDHWM, 0)
    socket.set(zmq.RCVHWM, 0)
    try:
        socket.bind(address)
    except zmq.ZMQError as error:
        socket.close(linger=0)
        folder.rmdir()
        raise OSError(f"no socket can be made in {folder}, which TMPDIR can change: {error}") from None
    child = await asyncio.create_subprocess_exec(
        sys.executable,
        # Nothing of the working directory is imported.
        *("-P", "-m", "quire_engine.ipc.loop"),
        stdin=asyncio.subprocess.PIPE,
        stdout=_STDERR,
        env=compute_environment(config.threads, os.environ),
    )
    assert child.stdin is not None
    child.stdin.write(start_up.encode(start_up.StartUp(address=address, config=config, factory=factory)))
    return EngineProcess(child, socket, folder)
