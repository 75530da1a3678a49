"""`cluster.py images`: the images made, in a registry where there is one, and what they consist of printed."""

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
    """`registry` None: the test cluster's, where that runs. `tag`: one that all three get beside their own."""
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
        print("In no registry: that of the test cluster does not run (make cluster-up), and REGISTRY names none.")
    else:
        values = made.chart_values() if tag is None else {"images": {"registry": destination, "tag": tag}}
        print(f"The chart's values for them:\n{json.dumps(values)}")
    return 0


def _tag(made: Images, tag: str, progress: Progress) -> None:
    build_images(progress)  # a registry may have what the store no longer has
    with store(progress) as buildah:
        for image in made.by_target().values():
            push(buildah, image, f"{image.registry}/{image.repository}:{tag}", progress)
