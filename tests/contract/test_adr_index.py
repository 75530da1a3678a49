"""docs/adr/README.md lists every record with its title, in order."""

import re
from pathlib import Path

FOLDER = Path(__file__).parents[2] / "docs" / "adr"


def test_the_index_lists_every_record_with_its_title() -> None:
    titles = {file.name: file.read_text().split("\n", 1)[0] for file in sorted(FOLDER.glob("0*.md"))}
    rows = re.findall(r"^\| \[(\d{4})\]\((.+?)\) \| (.+?) \|", (FOLDER / "README.md").read_text(), re.MULTILINE)
    assert {name: f"# {number}: {title}" for number, name, title in rows} == titles
    assert [number for number, _, _ in rows] == sorted(name[:4] for name in titles)
