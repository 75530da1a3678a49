"""The CRD, the chart's copy and docs/crd.md are what `make generate` writes, and the page leaves no field out."""

import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "crd.md"
CRD = ROOT / "crds" / "llmdeployments.yaml"


def test_generated_files_are_up_to_date() -> None:
    check = subprocess.run([sys.executable, ROOT / "crds" / "generate.py", "--check"], capture_output=True, text=True)
    assert (check.returncode, check.stderr) == (0, "")


def test_every_field_has_a_row_and_every_link_a_section() -> None:
    page = PAGE.read_text()
    (version,) = yaml.safe_load(CRD.read_text())["spec"]["versions"]
    properties = version["schema"]["openAPIV3Schema"]["properties"]
    paths = [path for name in ("spec", "status") for path in fields(name, properties[name])]
    assert len(paths) > 80
    assert [path for path in paths if f"| `{path.rpartition('.')[2]}` |" not in page] == []
    anchors = {
        line.lstrip("# ").replace(".", "").replace("[]", "").lower() for line in page.splitlines() if "##" in line
    }
    links = {part.partition(")")[0] for part in page.split("](#")[1:]}
    assert links <= anchors


def fields(path: str, schema: Mapping[str, Any]) -> Iterator[str]:
    for name, child in schema.get("properties", {}).items():
        yield f"{path}.{name}"
        yield from fields(f"{path}.{name}", child.get("items", child))
