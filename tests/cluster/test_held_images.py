"""A node removes old names of its registry's images, and nothing else."""

import pytest

from quire_cluster.nodes.held_images import outdated

REGISTRY = "10.77.0.1:5000"
HEAD = "REF TYPE DIGEST SIZE PLATFORMS LABELS"
PAUSE = "quire.local/pause:1 application/vnd.docker.distribution.manifest.v2+json sha256:aa 300.0 KiB linux/amd64 -"
OLD = f"{REGISTRY}/quire-engine:old"
NEW = f"{REGISTRY}/quire-engine:new"


def row(name: str, digest: str) -> str:
    return f"{name} application/vnd.oci.image.manifest.v1+json {digest} 1.1 GiB linux/amd64 image=managed"


def of_image(name: str, digest: str) -> list[str]:
    """Return the names of an image by tag, digest and configuration."""
    repository = name.rpartition(":")[0]
    return [row(name, digest), row(f"{repository}@{digest}", digest), row(f"sha256:config-of-{digest}", digest)]


def listing(*rows: str) -> str:
    return "\n".join([HEAD, *rows, ""])


@pytest.mark.parametrize(
    ("rows", "expected"),
    [
        ([], ()),
        ([PAUSE], ()),
        ([PAUSE, *of_image(NEW, "sha256:22")], ()),
        (
            [PAUSE, *of_image(OLD, "sha256:11"), *of_image(NEW, "sha256:22")],
            (OLD, f"{REGISTRY}/quire-engine@sha256:11", "sha256:config-of-sha256:11"),
        ),
        # Another name of a required image, whose removal would free nothing.
        ([row(OLD, "sha256:22"), *of_image(NEW, "sha256:22")], ()),
        # A user's own image from another source.
        (of_image("registry.example/quire-engine:old", "sha256:33"), ()),
        ([row(OLD, "sha256:44"), row("registry.example/quire-engine:old", "sha256:44")], ()),
    ],
    ids=["none", "pause", "needed", "old", "renamed", "foreign", "old and foreign"],
)
def test_only_earlier_versions_from_the_registry_are_outdated(rows: list[str], expected: tuple[str, ...]) -> None:
    assert outdated(listing(*rows), registry=REGISTRY, kept={NEW}) == expected
