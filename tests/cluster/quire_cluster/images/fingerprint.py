"""The tag of an image as a hash of its inputs: an unchanged image is not built, pushed or pulled again.

Stages of other targets, unused arguments and files excluded by .dockerignore do not count.
"""

import hashlib
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Final

from quire_cluster.images.context import context_files
from quire_cluster.images.dockerfile import Dockerfile, Stage

_TAG_LENGTH: Final = 12


def fingerprint(context: Path, dockerfile: Dockerfile, target: str, arguments: Mapping[str, str]) -> str:
    stages = dockerfile.needed(target)
    digest = hashlib.sha256()
    for part in (*_recipe(dockerfile, stages), *_taken(dockerfile, stages, arguments)):
        _add(digest, part.encode())
    for path in context_files(context, stages):
        executable = path.stat().st_mode & 0o111
        _add(digest, f"{path.relative_to(context)} {bool(executable)}".encode())
        _add(digest, path.read_bytes())
    return digest.hexdigest()[:_TAG_LENGTH]


def _recipe(dockerfile: Dockerfile, stages: Iterable[Stage]) -> Iterator[str]:
    for default in dockerfile.defaults:
        yield default.rest
    for stage in stages:
        yield f"{stage.name} {stage.base}"
        for instruction in stage.instructions:
            yield f"{instruction.keyword} {instruction.rest}"


def _taken(dockerfile: Dockerfile, stages: Iterable[Stage], arguments: Mapping[str, str]) -> Iterator[str]:
    names = {default.rest.partition("=")[0] for default in dockerfile.defaults}
    names.update(name for stage in stages for name in stage.build_arguments)
    for name in sorted(names & arguments.keys()):
        yield f"{name}={arguments[name]}"


def _add(digest: "hashlib._Hash", part: bytes) -> None:
    """Add a part with its length, so that different lists of parts differ."""
    digest.update(f"{len(part)} ".encode())
    digest.update(part)
