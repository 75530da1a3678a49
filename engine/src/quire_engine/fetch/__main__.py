"""``quire-fetch``: download a model from a hub or a bucket.

``--to`` is what the init container of a pod runs: the folder becomes a link to files that are cached next to it.
``--cache`` and ``--describe`` serve the ``quire`` command, which reads JSON lines from standard output. A version in a
cache is complete or absent, processes that share a volume download it once, and an interrupted download is resumed.
"""

import argparse
import asyncio
import json
import os
import signal
import sys
import time
from collections.abc import Callable, Coroutine, Sequence
from contextlib import suppress
from pathlib import Path

from quire_common.contract.engine import FETCHED_VERSION
from quire_common.model_source import NO_DOWNLOAD, UNPACK, ImageSource, RemoteSource, cached_version, parse_source
from quire_common.quantities import format_bytes
from quire_engine.errors import FetchError
from quire_engine.fetch.progress_server import Latest, served
from quire_engine.fetch.remote_files import Origin, Progress, Say

_REPORT_SECONDS = 10.0
_STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM)
_DESCRIPTION = """Download a model, or resume an interrupted download.

Credentials come from the variables and files of each source's own tools: HF_TOKEN and HF_ENDPOINT for a hub;
AWS_PROFILE, AWS_ACCESS_KEY_ID, AWS_REGION and AWS_ENDPOINT_URL for a bucket.

  quire-fetch hf://Qwen/Qwen3-0.6B --to models/qwen3
  quire-fetch s3://my-models/llama --to models/llama
"""


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command; exit with 0, with 2 for an error of the user, or with 128 plus a signal's number."""
    options = _parser().parse_args(argv)
    try:
        source = _remote(options.source)
        if options.describe:
            found = _origin(source).describe()
            _print_json({"config": found.config, "parameters": found.parameters})
            return
        log: Path | None = options.termination_log
        work = _to(source, options.to, log, options.progress_port) if options.to else _to_cache(source, options.cache)
        stopped = asyncio.run(_until_stopped(work))
    except FetchError as error:
        _report(error, options)
        if options.optional and options.to:
            print("continuing without it, because it is optional", flush=True)
            return
        sys.exit(error.exit_code)
    if stopped is not None:
        if options.to:
            print("stopped; downloaded data is kept, and the next run resumes", flush=True)
        sys.exit(128 + stopped)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="quire-fetch", description=_DESCRIPTION, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "source",
        metavar="SOURCE",
        help="hf://org/name@revision or s3://bucket/path",
    )
    place = parser.add_mutually_exclusive_group(required=True)
    place.add_argument("--to", type=Path, metavar="FOLDER", help="the model's folder; its files are cached next to it")
    place.add_argument(
        "--cache", type=Path, metavar="FOLDER", help="a cache of models; progress and result are JSON lines"
    )
    place.add_argument(
        "--describe",
        action="store_true",
        help="print configuration and number of parameters as JSON; download no weights",
    )
    parser.add_argument(
        "--termination-log",
        type=Path,
        metavar="FILE",
        help="write the error, or the downloaded version, there in one line",
    )
    parser.add_argument(
        "--progress-port",
        type=int,
        metavar="PORT",
        help="with --to: serve the progress at http://…:PORT/progress while downloading",
    )
    parser.add_argument(
        "--optional",
        action="store_true",
        help="with --to: exit with 0 if the model cannot be downloaded, after the error was printed",
    )
    return parser


def _remote(text: str) -> RemoteSource:
    source = parse_source(text)
    if isinstance(source, ImageSource):
        raise FetchError(f"{text} {NO_DOWNLOAD}", hint=UNPACK)
    if not isinstance(source, RemoteSource):
        raise FetchError(
            f"{text} is not a source to download from", hint="write hf://org/name@revision or s3://bucket/path"
        )
    return source


async def _until_stopped(work: Coroutine[None, None, None]) -> int | None:
    """Run ``work``; return the signal that stopped it, if one did.

    The first process of a container ends by no signal that it does not handle.
    """
    task = asyncio.ensure_future(work)
    received: list[int] = []
    loop = asyncio.get_running_loop()

    def stop(number: int) -> None:
        received.append(number)
        task.cancel()

    for number in _STOP_SIGNALS:
        loop.add_signal_handler(number, stop, number)
    try:
        await task
    except asyncio.CancelledError:
        return received[0] if received else signal.SIGINT
    return None


async def _to(source: RemoteSource, folder: Path, termination_log: Path | None, progress_port: int | None) -> None:
    def say(line: str) -> None:
        print(line, flush=True)

    if folder.exists() and not folder.is_symlink():
        raise FetchError(f"{folder} exists already", hint="choose another folder, or remove it")
    lines, latest = ProgressLines(str(source), say, time.monotonic), Latest()

    def progress(done: int, total: int) -> None:
        latest(done, total)
        lines(done, total)

    with served(latest, progress_port, say=say):
        _link(folder, await _fetch(source, folder.parent, progress=progress, say=say))
    version = cached_version(folder.parent, source)
    if version is not None:
        _write_last_words(termination_log, f"{FETCHED_VERSION}{version}")
    say(f"{source} is at {folder}")


async def _to_cache(source: RemoteSource, cache: Path) -> None:
    def progress(done: int, total: int) -> None:
        _print_json({"done": done, "total": total})

    def say(line: str) -> None:
        _print_json({"message": line})

    _print_json({"folder": str(await _fetch(source, cache, progress=progress, say=say))})


async def _fetch(source: RemoteSource, cache: Path, *, progress: Progress, say: Say) -> Path:
    from quire_engine.fetch import model_cache  # slow to import

    manner = model_cache.Manner(say=say)
    return await model_cache.fetch(source, _origin(source), cache, progress=progress, manner=manner)


def _origin(source: RemoteSource) -> Origin:
    from quire_engine.fetch.model_cache import origin_of  # slow to import

    return origin_of(source)


class ProgressLines:
    """Progress as log lines: the first, one every ten seconds, and the last."""

    def __init__(self, what: str, say: Callable[[str], None], clock: Callable[[], float]) -> None:
        self._what, self._say, self._clock = what, say, clock
        self._start: tuple[float, int] | None = None
        self._last = float("-inf")

    def __call__(self, done: int, total: int) -> None:
        now = self._clock()
        if self._start is None:
            self._start = (now, done)
        if now - self._last >= _REPORT_SECONDS or done == total:
            self._last = now
            self._say(self._line(now, done, total))

    def _line(self, now: float, done: int, total: int) -> str:
        line = f"{self._what}: {format_bytes(done)} of {format_bytes(total)}"
        start, before = self._start or (now, done)
        if done == before or now <= start:
            return line
        rate = (done - before) / (now - start)
        left = f", {_duration((total - done) / rate)} left" if done < total else ""
        return f"{line} ({100 * done // total} %), {format_bytes(int(rate))}/s{left}"


def _duration(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 120 else f"{seconds / 60:.0f} min"


def _report(error: FetchError, options: argparse.Namespace) -> None:
    details, hint = list(error.details), error.hint
    if options.to is None:
        _print_json({"error": {"message": error.message, "details": details, "hint": hint}})
        return
    print(
        "\n".join([f"quire: {error.message}", *(f"  {detail}" for detail in details), *([hint] if hint else [])]),
        file=sys.stderr,
    )
    words = "; ".join([f"quire: {error.message}", *details, *([hint] if hint else [])])
    _write_last_words(options.termination_log, words.replace("\n", " "))


def _write_last_words(file: Path | None, text: str) -> None:
    """Write what the kubelet puts into the status of the pod; the output of the command says the same."""
    if file is not None:
        with suppress(OSError):
            file.write_text(text)


def _print_json(value: dict[str, object]) -> None:
    print(json.dumps(value), flush=True)


def _link(folder: Path, files: Path) -> None:
    # Relative if possible: other pods mount the volume elsewhere. Replaced in one step: they may be reading.
    within = files.is_relative_to(folder.parent)
    target = files.relative_to(folder.parent) if within else files.resolve()
    fresh = folder.with_name(f".{folder.name}.{os.getpid()}")
    fresh.unlink(missing_ok=True)
    try:
        fresh.symlink_to(target)
        fresh.replace(folder)
    except OSError as error:
        raise FetchError(f"{folder} cannot be created: {error.strerror}") from error


if __name__ == "__main__":
    main()
