"""Worker processes for what a client can make slow or large: the frames between them and the server, and their end."""

import asyncio
import contextlib
import os
import queue
import resource
import sys
import threading
from collections.abc import AsyncIterator, Callable
from typing import BinaryIO

import msgspec

LENGTH_BYTES = 8
_encode = msgspec.json.Encoder(decimal_format="number").encode


def frame(message: msgspec.Struct) -> bytes:
    """Return a message as JSON with its length before it."""
    body = _encode(message)
    return len(body).to_bytes(LENGTH_BYTES, "big") + body


def bound_memory(num_bytes: int) -> None:
    """Bound the address space of this process."""
    resource.setrlimit(resource.RLIMIT_AS, (num_bytes, num_bytes))


def answer_frames(set_up: Callable[[bytes], Callable[[bytes], msgspec.Struct]], ready: msgspec.Struct) -> None:
    """Answer frames until the input ends. The first one is for ``set_up``, which returns what answers the others."""
    # A library must not write between the frames.
    output = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    respond = set_up(_read_frame(sys.stdin.buffer))
    frames: queue.SimpleQueue[bytes] = queue.SimpleQueue()
    # A thread of its own notices the end of the input also while a frame is answered.
    threading.Thread(target=_read_frames, args=(frames,), daemon=True).start()
    answer = ready
    while True:
        output.write(frame(answer))
        output.flush()
        answer = respond(frames.get())


def _read_frames(frames: "queue.SimpleQueue[bytes]") -> None:
    while True:
        try:
            frames.put(_read_frame(sys.stdin.buffer))
        except EOFError:
            os._exit(0)


def _read_frame(stream: BinaryIO) -> bytes:
    head = stream.read(LENGTH_BYTES)
    body = stream.read(int.from_bytes(head, "big"))
    if len(head) < LENGTH_BYTES or len(body) < int.from_bytes(head, "big"):
        raise EOFError
    return body


_START_SECONDS = 60.0


class WorkerTooSlow(Exception):
    """A frame was not answered in time; the process is replaced."""


class WorkerFailed(Exception):
    """The process ended instead of answering; it is replaced."""


class WorkerProcess:
    """A process that runs ``module``. Its first frame is ``setup``; further frames have a deadline each."""

    def __init__(self, module: str, setup: bytes, *, wall_seconds: float) -> None:
        self._command = (sys.executable, "-P", "-m", module)
        self._setup = setup
        self._wall_seconds = wall_seconds
        self._process: asyncio.subprocess.Process | None = None

    async def start(self) -> "asyncio.subprocess.Process":
        """Start the process unless it runs, and return it when it is ready. Raises WorkerTooSlow, WorkerFailed."""
        async with self._ended_on_error(_START_SECONDS):
            if self._process is not None and self._process.returncode is not None:
                await self.end()
            if self._process is None:
                self._process = await asyncio.create_subprocess_exec(
                    *self._command,
                    stdin=asyncio.subprocess.PIPE,
                    stdout=asyncio.subprocess.PIPE,
                    start_new_session=True,  # Ctrl-C begins a drain, during which requests are still served
                )
                await _ask(self._process, self._setup)
        return self._process

    async def ask(self, message: bytes) -> bytes:
        """Return the answer to one frame. Raises WorkerTooSlow, WorkerFailed."""
        process = await self.start()
        async with self._ended_on_error(self._wall_seconds):
            answer = await _ask(process, message)
        return answer

    @contextlib.asynccontextmanager
    async def _ended_on_error(self, seconds: float) -> AsyncIterator[None]:
        try:
            async with asyncio.timeout(seconds):
                yield
        except TimeoutError as error:
            await self.end()
            raise WorkerTooSlow from error
        except (OSError, asyncio.IncompleteReadError) as error:
            await self.end()
            raise WorkerFailed from error
        except BaseException:
            await self.end()
            raise

    async def end(self) -> None:
        """Kill the process, if it runs."""
        process, self._process = self._process, None
        if process is None:
            return
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.wait()
        assert process.stdin is not None
        process.stdin.close()


async def _ask(process: asyncio.subprocess.Process, message: bytes) -> bytes:
    assert process.stdin is not None and process.stdout is not None
    process.stdin.write(message)
    await process.stdin.drain()
    length = int.from_bytes(await process.stdout.readexactly(LENGTH_BYTES), "big")
    return await process.stdout.readexactly(length)
