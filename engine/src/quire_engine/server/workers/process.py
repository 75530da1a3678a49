"""One worker process as the server uses it: it starts with its first frame, and again after its end."""

import asyncio
import contextlib
import sys
from collections.abc import AsyncIterator

from quire_engine.server.workers.child import LENGTH_BYTES

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
