"""A bucket with the demo model in the cluster, so that a scenario can download a model without the internet."""

from pathlib import Path
from typing import Any, Final

from e2e_support import bucket_server
from e2e_support.kube import namespaced
from e2e_support.probes import PORT, PYTHON, listener
from e2e_support.space import Space

NAME: Final = "bucket"
DEMO_FOLDER: Final = "/models/models/quire-demo"
"""The demo model in the engine's image."""


def model_bucket(space: Space, *, image: str) -> str:
    """Serve the demo model of the engine's image as a bucket; return the model's source when it can be downloaded."""
    script = Path(bucket_server.__file__).read_text()
    listener(space, NAME, image=image, command=[PYTHON, "-c", script, DEMO_FOLDER, str(PORT)])
    service: dict[str, Any] = {
        "metadata": {"name": NAME},
        "spec": {"selector": {"app": NAME}, "ports": [{"name": "http", "port": PORT, "targetPort": PORT}]},
    }
    space.kube.create(namespaced(space.name, "services"), service)
    return source(f"http://{NAME}.{space.name}.svc:{PORT}")


def source(endpoint: str) -> str:
    """Return spec.model.source for the bucket at this address."""
    return f"s3://models/quire-demo?endpoint={endpoint}"
