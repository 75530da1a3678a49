"""Compiled Triton kernels that come with an image, for processes that cannot write where they lie.

``QUIRE_PRECOMPILED_TRITON`` names a folder that was a TRITON_CACHE_DIR at the same path when the image was built. Its
entries are linked into this process's own cache, so that Triton finds them by its usual keys: source, types, constants,
options, target, and the versions of Triton and its assembler. A kernel that is not there is compiled as ever.
"""

import os
from pathlib import Path

VARIABLE = "QUIRE_PRECOMPILED_TRITON"


def link_shipped_kernels(cache: Path | None = None) -> int:
    """Link the kernels of the folder into Triton's cache; return the number of those that were not there yet."""
    if cache is None:
        from triton import knobs

        cache = Path(knobs.cache.dir)
    # A cache may outlive its image. Triton fails at a link to a kernel that the image of now does not have.
    for entry in cache.iterdir() if cache.is_dir() else ():
        if entry.is_symlink() and not entry.exists():
            entry.unlink(missing_ok=True)
    shipped = Path(named) if (named := os.environ.get(VARIABLE)) else None
    if shipped is None or not shipped.is_dir() or shipped.resolve() == cache.resolve():
        return 0
    cache.mkdir(parents=True, exist_ok=True)
    linked = 0
    for entry in shipped.iterdir():
        place = cache / entry.name
        try:
            place.symlink_to(entry, target_is_directory=True)
            linked += 1
        except FileExistsError:
            continue
    return linked
