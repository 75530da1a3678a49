"""The command `cluster.py images`: build the images, push them to a registry, and print their layers."""

import json
import time

from quire_cluster.errors import ImageBuildFailed
from quire_cluster.images.ensure import build_images, ensure_images, listed, push
from quire_cluster.images.image import Images
from quire_cluster.images.listing import table
from quire_cluster.images.registry import OWN, Registry
from quire_cluster.images.store import store
from quire_cluster.progress import Progress, minutes_and_seconds


def images(registry: str | None, tag: str | None, progress: Progress) -> int:
    """Run the command. Without `registry`, it uses the running test cluster's; `tag` is an additional tag."""
    started = time.monotonic()
    destination = registry or (OWN if Registry(address=OWN).answers() else None)
    if destination is None:
        if tag is not None:
            raise ImageBuildFailed(
                "TAG is the images' name in a registry: say which, as in REGISTRY=registry.example/team"
            )
        made = build_images(progress)
    else:
        made = ensure_images(destination, progress)
        if tag is not None:
            _tag(made, tag, progress)
    print(table(listed(made)))
    print(f"\n# Ready after {minutes_and_seconds(time.monotonic() - started)}.", end=" ")
    if destination is None:
        print("Not pushed: the registry of the test cluster does not run (make cluster-up), and REGISTRY is not set.")
    else:
        values = made.chart_values() if tag is None else {"images": {"registry": destination, "tag": tag}}
        print(f"The chart's values for them:\n{json.dumps(values)}")
    return 0


def _tag(made: Images, tag: str, progress: Progress) -> None:
    build_images(progress)  # a registry may have an image that the store no longer has
    with store(progress) as buildah:
        for image in made.by_target().values():
            push(buildah, image, f"{image.registry}/{image.repository}:{tag}", progress)
