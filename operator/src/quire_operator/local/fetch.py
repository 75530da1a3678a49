"""``quire fetch``: a hub's model into a folder of one's choice, as the init container of a pod does.

The files are kept beside that folder, as in quire's cache: whole or not there, one download at a time for all who share
the volume, resumed after a kill. The folder itself is a link to them, made last.
"""

import asyncio
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import typer

from quire_operator.domain.quantities import format_bytes
from quire_operator.domain.spec import HubSource
from quire_operator.domain.spec.model import parse_source
from quire_operator.errors import ModelProblem

_REPORT_SECONDS = 5.0


def fetch(
    source: Annotated[str, typer.Argument(help="The model: hf://org/name@revision.")],
    to: Annotated[Path, typer.Option("--to", help="Where it shall be; its files are kept beside it.")],
) -> None:
    """Download a model of a hub, or go on with a download that was cut off. Prints a line each few seconds.

    HF_ENDPOINT names another hub, HF_TOKEN holds the token for a private or gated model.

      quire fetch hf://Qwen/Qwen3-0.6B --to models/qwen3
    """
    parsed = parse_source(source)
    if not isinstance(parsed, HubSource):
        raise ModelProblem(f"{source} is no model of a hub", hint="write hf://org/name or hf://org/name@revision")
    asyncio.run(fetch_to(parsed, to, say=lambda line: print(line, flush=True), clock=time.monotonic))


async def fetch_to(source: HubSource, folder: Path, *, say: Callable[[str], None], clock: Callable[[], float]) -> None:
    """Have ``folder`` be the model. Raises ``ModelProblem``."""
    from quire_operator.adapters import hub_download  # slow to import

    if folder.exists() and not folder.is_symlink():
        raise ModelProblem(f"{folder} is there already", hint="choose another folder, or remove it")
    told = clock()

    def progress(done: int, total: int) -> None:
        nonlocal told
        if clock() - told >= _REPORT_SECONDS or done == total:
            told = clock()
            say(f"{source}: {format_bytes(done)} of {format_bytes(total)}")

    files = await hub_download.fetch(source.repository, source.revision, folder.parent, progress=progress)
    _link(folder, files)
    say(f"{source} is at {folder}")


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
