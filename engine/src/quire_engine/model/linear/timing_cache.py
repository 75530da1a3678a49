"""Times of linear backends on disk: ``${XDG_CACHE_HOME:-~/.cache}/quire/linear/<key>.json``.

A file that is damaged, of other backends or not to be written costs the measurement and nothing else.
"""

import hashlib
import json
import logging
import math
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path

import torch

from quire_engine import __version__
from quire_engine.model.linear.selection import Times

_log = logging.getLogger(__name__)


def key(*, dtype: str, width: int, threads: int, cpuinfo: Path = Path("/proc/cpuinfo")) -> str:
    """Of all that the times depend on: the CPU and its features, torch, this version, the layer, the threads."""
    told = [__version__, torch.__version__, torch.backends.cpu.get_cpu_capability(), dtype, str(width), str(threads)]
    return hashlib.sha256("\n".join([*told, *_cpu(cpuinfo)]).encode()).hexdigest()[:16]


def _cpu(cpuinfo: Path) -> list[str]:
    """Model and features of the first CPU."""
    try:
        lines = cpuinfo.read_text().splitlines()
    except OSError:
        return []
    first = lines[: lines.index("")] if "" in lines else lines
    return [line for line in first if line.startswith(("model name", "CPU part", "flags", "Features"))]


def read(key: str, names: tuple[str, ...], rows: int) -> Times | None:
    """None where there is no whole file of exactly these backends."""
    try:
        kept = json.loads((_folder() / f"{key}.json").read_bytes())
        times = {name: tuple(float(taken) for taken in kept[name]) for name in names}
    except (OSError, RuntimeError, ValueError, KeyError, TypeError):
        return None
    usable = len(kept) == len(names) and all(
        len(taken) == rows and all(math.isfinite(one) and one > 0.0 for one in taken) for taken in times.values()
    )
    return times if usable else None


def write(key: str, times: Mapping[str, tuple[float, ...]]) -> None:
    """Whole or not at all, as several engines may start at once."""
    try:
        folder = _folder()
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", dir=folder, suffix=".part", delete=False) as file:
            json.dump(times, file)
        os.replace(file.name, folder / f"{key}.json")
    except (OSError, RuntimeError) as error:  # RuntimeError: a user without a home folder
        _log.info("times of linear layers are not kept between starts: %s", error)


def _folder() -> Path:
    home = os.environ.get("XDG_CACHE_HOME")
    return (Path(home) if home else Path("~/.cache").expanduser()) / "quire" / "linear"
