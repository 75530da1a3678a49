"""docs/architecture.md names only files that exist."""

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def test_every_file_in_the_concept_table_exists() -> None:
    table = (ROOT / "docs/architecture.md").read_text().partition("| concept | source |")[2]
    rows = [line for line in table.splitlines() if line.startswith("|") and "`" in line]
    named = [path for row in rows for path in re.findall(r"`([^`]+)`", row.split("|")[2])]
    assert len(named) > 40
    assert [path for path in named if not (ROOT / path).exists()] == []
