"""``quire fetch``: a model from a hub, a bucket or a registry into a folder, as the init container of a pod does.

The files are kept beside that folder, as in quire's cache: whole or not there, one download at a time for all who share
the volume, resumed after a kill. The folder itself is a link to them, made last.
"""

import asyncio
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import typer

from quire_common.quantities import format_bytes
from quire_operator.domain.resource import RemoteSource
from quire_operator.domain.resource.sources import parse_source
from quire_operator.errors import ModelProblem, UserError

_REPORT_SECONDS = 10.0
_STOPPED_BY = (signal.SIGINT, signal.SIGTERM)


def fetch(
    source: Annotated[
        str, typer.Argument(help="hf://org/name@revision, s3://bucket/path or oci://registry/name:tag/path.")
    ],
    to: Annotated[Path, typer.Option("--to", help="Where it shall be; its files are kept beside it.")],
    termination_log: Annotated[
        Path | None, typer.Option("--termination-log", help="Write why it failed there, in one line.", hidden=True)
    ] = None,
) -> None:
    """Download a model, or go on with a download that was cut off. Prints a line each few seconds.

    Each source is asked as its own tools ask it: HF_TOKEN and HF_ENDPOINT for a hub; AWS_PROFILE, AWS_ACCESS_KEY_ID,
    AWS_REGION, AWS_ENDPOINT_URL and the like for a bucket; the logins of `docker login` for a registry.

      quire fetch hf://Qwen/Qwen3-0.6B --to models/qwen3

      quire fetch s3://my-models/llama --to models/llama

      quire fetch oci://registry.example/llama:8b --to models/llama
    """
    try:
        parsed = parse_source(source)
        if not isinstance(parsed, RemoteSource):
            raise ModelProblem(
                f"{source} is nothing to download",
                hint="write hf://org/name@revision, s3://bucket/path or oci://registry/name:tag",
            )
        stopped = asyncio.run(_fetch_or_stop(parsed, to))
    except UserError as error:
        _leave_behind(termination_log, error)
        raise
    if stopped is not None:
        print("stopped; what was downloaded is kept, and the next run goes on with it", flush=True)
        raise typer.Exit(128 + stopped)


async def _fetch_or_stop(source: RemoteSource, to: Path) -> int | None:
    """The signal that stopped it, if one did: a container's first process ends by no signal that it does not handle."""
    task = asyncio.create_task(fetch_to(source, to, say=lambda line: print(line, flush=True), clock=time.monotonic))
    received: list[int] = []
    loop = asyncio.get_running_loop()

    def stop(number: int) -> None:
        received.append(number)
        task.cancel()

    for number in _STOPPED_BY:
        loop.add_signal_handler(number, stop, number)
    try:
        await task
    except asyncio.CancelledError:
        return received[0] if received else signal.SIGINT
    return None


async def fetch_to(
    source: RemoteSource, folder: Path, *, say: Callable[[str], None], clock: Callable[[], float]
) -> None:
    """Have ``folder`` be the model. Raises ``ModelProblem``."""
    from quire_operator.adapters.fetch import model_cache, origins  # slow to import

    if folder.exists() and not folder.is_symlink():
        raise ModelProblem(f"{folder} is there already", hint="choose another folder, or remove it")
    report = _Report(str(source), say, clock)
    files = await model_cache.fetch(
        source,
        origins.origin_of(source),
        folder.parent,
        progress=report,
        manner=model_cache.Manner(say=say),
    )
    _link(folder, files)
    say(f"{source} is at {folder}")


class _Report:
    """Progress as lines of a log: the first, one now and then, and the last."""

    def __init__(self, what: str, say: Callable[[str], None], clock: Callable[[], float]) -> None:
        self._what, self._say, self._clock = what, say, clock
        self._began: tuple[float, int] | None = None
        self._told = float("-inf")

    def __call__(self, done: int, total: int) -> None:
        now = self._clock()
        if self._began is None:
            self._began = (now, done)
        if now - self._told >= _REPORT_SECONDS or done == total:
            self._told = now
            self._say(self._line(now, done, total))

    def _line(self, now: float, done: int, total: int) -> str:
        line = f"{self._what}: {format_bytes(done)} of {format_bytes(total)}"
        began, start = self._began or (now, done)
        if done == start or now <= began:
            return line
        rate = (done - start) / (now - began)
        left = f", {_duration((total - done) / rate)} left" if done < total else ""
        return f"{line} ({100 * done // total} %), {format_bytes(int(rate))}/s{left}"


def _duration(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 120 else f"{seconds / 60:.0f} min"


def _leave_behind(log: Path | None, error: UserError) -> None:
    if log is None:
        return
    words = [f"quire: {error.message}", *error.details, *([error.hint] if error.hint else [])]
    try:
        log.write_text("; ".join(words).replace("\n", " "))
    except OSError:
        return  # what was printed serves as well


def _link(folder: Path, files: Path) -> None:
    # Relative where it can be: a volume is mounted elsewhere by others. Replaced in one step: they may be reading.
    within = files.is_relative_to(folder.parent)
    target = files.relative_to(folder.parent) if within else files.resolve()
    fresh = folder.with_name(f".{folder.name}.{os.getpid()}")
    fresh.unlink(missing_ok=True)
    try:
        fresh.symlink_to(target)
        fresh.replace(folder)
    except OSError as error:
        raise ModelProblem(f"{folder} can't be made: {error.strerror}") from error
