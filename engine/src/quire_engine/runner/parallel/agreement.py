"""The agreement of all nodes of a group: the version, the model, and the options that decide what ranks compute."""

import hashlib
import json
from pathlib import Path
from typing import Any

import msgspec

from quire_engine import __version__, config_json
from quire_engine.config import EngineConfig

_LOCAL = {
    "model": ("path", "revision", "download_dir"),
    "device": ("cpu_level",),
    "parallel": ("node_rank", "master_addr", "secret_file", "join_timeout_seconds"),
}
"""The options that may differ between nodes, by part of the configuration."""
_COMPARED = ("model", "cache", "scheduler", "device", "parallel", "speculation", "pooling")
_LONGEST_HEADER = 100 << 20
"""The longest header of a file of safetensors, which that format allows."""


class Membership(msgspec.Struct, frozen=True, kw_only=True):
    """The version, model and options of a node."""

    node: int
    version: str
    model: str
    """The digest of the model's configuration and of the index of its tensors."""
    settings: dict[str, Any]
    """The options that must be the same, by name."""


def membership(config: EngineConfig) -> Membership:
    """Return what this node tells node 0."""
    return Membership(
        node=config.parallel.node_rank,
        version=__version__,
        model=model_digest(config.model.path, weights=config.model.load_format != "dummy"),
        settings=settings(config),
    )


def settings(config: EngineConfig) -> dict[str, Any]:
    """Return the options that must be the same on all nodes, by name."""
    found = {}
    for part in _COMPARED:
        # As JSON, both sides have the same types.
        options = json.loads(config_json.encode(getattr(config, part)))
        for name, value in (options or {part: None}).items():
            if name not in _LOCAL.get(part, ()):
                found[f"{part}.{name}"] = value
    return found


def disagreements(first: Membership, other: Membership) -> list[str]:
    """Return why a node cannot be in the group of node 0, which is ``first``; empty if it can."""
    problems = []
    if other.version != first.version:
        problems.append(f"quire-engine is {first.version} on node 0 and {other.version} on node {other.node}")
    for name in sorted(first.settings.keys() | other.settings.keys()):
        here, there = first.settings.get(name), other.settings.get(name)
        if here != there:
            problems.append(
                f"the option {name} is {json.dumps(here)} on node 0 and {json.dumps(there)} on node {other.node}"
            )
    if other.model != first.model:
        problems.append(
            f"the model of node {other.node} is another one than that of node 0: config.json or the tensors of the"
            " safetensors files differ"
        )
    return problems


def model_digest(folder: Path, *, weights: bool) -> str:
    """Return the digest of the configuration, and of the names, types and places of all tensors.

    The values of tensors are not read.
    """
    digest = hashlib.sha256((folder / "config.json").read_bytes())
    for path in sorted(folder.glob("*.safetensors")) if weights else ():
        with path.open("rb") as file:
            size = int.from_bytes(file.read(8), "little")
            digest.update(path.name.encode() + file.read(min(size, _LONGEST_HEADER)))
    return digest.hexdigest()
