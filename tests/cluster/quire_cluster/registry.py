"""An image registry on the bridge, which images are pushed to and nodes pull from. Pure.

Its storage is in the cache: what was pushed once is there for the next cluster.
"""

import json
from pathlib import Path

from quire_cluster.nodes.plan import REGISTRY

READY_URL = f"http://{REGISTRY}/v2/"


def config(storage: Path) -> str:
    document = {
        "version": 0.1,
        "log": {"level": "warn", "accesslog": {"disabled": True}},
        "storage": {"filesystem": {"rootdirectory": str(storage)}, "delete": {"enabled": True}},
        "http": {"addr": REGISTRY},
    }
    return json.dumps(document, indent=2) + "\n"


def command(program: Path, config_file: Path) -> list[str]:
    return [str(program), "serve", str(config_file)]
