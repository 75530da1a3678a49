"""Which of a node's images nobody needs any more. Pure.

An image is known by several names: by tag, by digest, and to the kubelet's interface by its configuration's digest. Its
layers go with the last of them.
"""

from collections.abc import Collection


def outdated(listing: str, *, registry: str, kept: Collection[str]) -> tuple[str, ...]:
    """All names of images from `registry` that none of the `kept` is a name of, out of what `ctr images ls` says."""
    rows = [line.split() for line in listing.splitlines()[1:]]
    digests = {row[0]: row[2] for row in rows if len(row) >= 3}
    needed = {digest for name, digest in digests.items() if name in kept or not _is_ours(name, registry)}
    # A digest's name alone says nothing of where it is from.
    from_here = {digest for name, digest in digests.items() if name.startswith(f"{registry}/")}
    return tuple(name for name, digest in digests.items() if digest in from_here - needed)


def _is_ours(name: str, registry: str) -> bool:
    return name.startswith((f"{registry}/", "sha256:"))
