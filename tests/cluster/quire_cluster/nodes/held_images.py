"""Images of a node that are no longer needed. Pure.

An image has several names: by tag, by digest, and for the kubelet's interface by the digest of its configuration. Its
layers are removed with the last name.
"""

from collections.abc import Collection


def outdated(listing: str, *, registry: str, kept: Collection[str]) -> tuple[str, ...]:
    """Return all names of images from `registry` except the `kept` ones, from the output of `ctr images ls`."""
    rows = [line.split() for line in listing.splitlines()[1:]]
    digests = {row[0]: row[2] for row in rows if len(row) >= 3}
    needed = {digest for name, digest in digests.items() if name in kept or not _is_ours(name, registry)}
    # A name by digest does not contain the registry.
    from_here = {digest for name, digest in digests.items() if name.startswith(f"{registry}/")}
    return tuple(name for name, digest in digests.items() if digest in from_here - needed)


def _is_ours(name: str, registry: str) -> bool:
    return name.startswith((f"{registry}/", "sha256:"))
