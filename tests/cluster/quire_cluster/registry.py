"""An image registry on the bridge, to which images are pushed and from which nodes pull.

Its storage is in the cache, so pushed images are available to the next cluster unless it has grown too large.
"""

import json
import shutil
from pathlib import Path
from typing import Final

from quire_cluster.nodes.plan import REGISTRY

READY_URL = f"http://{REGISTRY}/v2/"
MOST_BYTES_KEPT: Final = 8_000_000_000  # some ten versions of the images


def config(storage: Path) -> str:
    document = {
        "version": 0.1,
        "log": {"level": "warn", "accesslog": {"disabled": True}},
        "storage": {"filesystem": {"rootdirectory": str(storage)}, "delete": {"enabled": True}},
        "http": {"addr": REGISTRY},
    }
    return json.dumps(document, indent=2) + "\n"


def make_storage(storage: Path) -> None:
    """Prepare the storage before a start. A storage that has grown too large is removed; images are pushed again."""
    if sum(file.stat().st_size for file in storage.rglob("data")) > MOST_BYTES_KEPT:
        shutil.rmtree(storage)
    storage.mkdir(parents=True, exist_ok=True)


def command(program: Path, config_file: Path) -> list[str]:
    return [str(program), "serve", str(config_file)]
