"""`cluster.py images`: has the images in a registry, and prints what they are made of."""

import json
import time

from quire_cluster.images.ensure import ensure_images, listed
from quire_cluster.images.listing import table
from quire_cluster.progress import Progress, minutes_and_seconds


def images(registry: str, progress: Progress) -> int:
    started = time.monotonic()
    ensured = ensure_images(registry, progress)
    progress.say(f"==> the images are in {registry}, after {minutes_and_seconds(time.monotonic() - started)}")
    print(table(listed(ensured)))
    print("# for the chart: helm install quire charts/quire --values - <<< '…'")
    print(json.dumps(ensured.chart_values()))
    return 0
