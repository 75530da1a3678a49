"""The input files of an image: those that its stages copy, without those excluded by .dockerignore.

A build takes a while and the checkout may change meanwhile, so the build uses a copy, from which the tag is computed
too.
"""

import shutil
from collections.abc import Iterable
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Final

from quire_cluster.images.dockerfile import Stage, parse

DOCKERFILE: Final = "Dockerfile"
DOCKERIGNORE: Final = ".dockerignore"


def context_files(context: Path, stages: Iterable[Stage]) -> tuple[Path, ...]:
    """Return the files in a fixed order."""
    ignored = ignored_names((context / DOCKERIGNORE).read_text())
    found = set[Path]()
    for source in {source for stage in stages for source in stage.sources}:
        path = context / source
        for each in (path,) if path.is_file() else path.rglob("*"):
            parts = each.relative_to(context).parts
            if each.is_file() and not any(fnmatchcase(part, name) for part in parts for name in ignored):
                found.add(each)
    return tuple(sorted(found))


def ignored_names(dockerignore: str) -> tuple[str, ...]:
    """Return the names that are excluded everywhere: the patterns `**/NAME`."""
    return tuple(line.removeprefix("**/") for line in dockerignore.splitlines() if line.startswith("**/"))


def copy_context(context: Path, into: Path) -> None:
    """Copy the input files of all targets."""
    stages = parse((context / DOCKERFILE).read_text()).stages
    for path in (context / DOCKERFILE, context / DOCKERIGNORE, *context_files(context, stages)):
        copy = into / path.relative_to(context)
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(path, copy)
