"""The chart as rendered by helm, in files: `make chart-snapshots` writes them, a test compares.

The CRD, which has its own test, is left out, and so are objects that the snapshot of the defaults has. Dashboards and
alerts are separate files under charts/quire, so only their beginning is kept.
"""

import sys
import tempfile
from pathlib import Path
from typing import Any

import yaml
from chart_support.values import EVERYTHING

from quire_cluster.binaries import HELM, ensure
from quire_cluster.helm import Helm
from quire_cluster.progress import Progress

ROOT = Path(__file__).parents[3]
CHART = ROOT / "charts" / "quire"
FOLDER = ROOT / "tests" / "charts" / "snapshots"

SNAPSHOTS: dict[str, dict[str, Any]] = {
    "defaults": {},
    "namespaced": {"watchNamespaces": ["team-a"]},
    "everything": EVERYTHING,
}


def rendered(helm: Helm, name: str) -> str:
    """Return one snapshot's text, in helm's order of objects."""
    left_out = helm.template() if SNAPSHOTS[name] else []
    documents = [d for d in helm.template(SNAPSHOTS[name]) if d["kind"] != "CustomResourceDefinition"]
    kept = [_shortened(document) for document in documents if document not in left_out]
    return "---\n".join(yaml.safe_dump(document, sort_keys=False, width=120) for document in kept)


def _shortened(document: dict[str, Any]) -> dict[str, Any]:
    if document["kind"] != "ConfigMap":
        return document
    return document | {"data": {name: f"({text.splitlines()[0]} …)" for name, text in document["data"].items()}}


def main() -> None:
    with tempfile.TemporaryDirectory() as scratch:
        helm = Helm(ensure(HELM.programs, Progress(sys.stdout))["helm"], CHART, Path(scratch))
        FOLDER.mkdir(exist_ok=True)
        for name in SNAPSHOTS:
            (FOLDER / f"{name}.yaml").write_text(rendered(helm, name))


if __name__ == "__main__":
    main()
