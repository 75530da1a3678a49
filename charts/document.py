"""Writes what is made of the comments in charts/quire/values.yaml: the table in README.md, the schema's descriptions.

python charts/document.py [CHART]

A comment belongs to the key below it. What stands on one line, or is empty, is one value and has one row.
"""

import json
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

CHART = Path(__file__).with_name("quire")
BEGIN, END = "<!-- values: made by `make chart-docs` -->", "<!-- end of values -->"
_KEY = re.compile(r"(?P<indent> *)(?P<name>[A-Za-z]+):(?P<rest>.*)")
_WIDTH = 120


@dataclass(frozen=True, slots=True, kw_only=True)
class Value:
    """One key of values.yaml."""

    path: tuple[str, ...]
    description: str
    """Empty where there is no comment."""
    default: object
    is_section: bool
    """Whether it only holds others."""


def main() -> None:
    chart = Path(sys.argv[1]) if len(sys.argv) > 1 else CHART
    values = read(chart / "values.yaml")
    page, schema = chart / "README.md", chart / "values.schema.json"
    page.write_text(with_table(page.read_text(), values))
    schema.write_text(written(described(json.loads(schema.read_text()), values)))


def read(file: Path) -> list[Value]:
    """In the order of the file."""
    text = file.read_text()
    defaults = yaml.safe_load(text)
    values: list[Value] = []
    path: list[str] = []
    comment: list[str] = []
    inside = len(text)  # of what is one value on several lines: how far its lines are indented at the least
    for line in text.splitlines():
        match = _KEY.fullmatch(line)
        if line.strip() and len(line) - len(line.lstrip()) >= inside:
            continue
        if match is None:
            # An empty line parts a comment on what follows in general from the comment of one key.
            comment = [*comment, line.strip()[1:].strip()] if line.strip().startswith("#") else []
            continue
        path = [*path[: len(match["indent"]) // 2], match["name"]]
        default = defaults
        for name in path:
            default = default[name]
        values.append(
            Value(
                path=tuple(path),
                description=" ".join(comment),
                default=default,
                is_section=isinstance(default, Mapping) and not match["rest"].strip(),
            )
        )
        comment = []
        is_open = not match["rest"].strip() and not isinstance(default, Mapping)
        inside = len(match["indent"]) + 1 if is_open else len(text)
    return values


def with_table(page: str, values: list[Value]) -> str:
    """The page with its table made anew."""
    before, _, rest = page.partition(BEGIN)
    after = rest.partition(END)[2]
    return f"{before}{BEGIN}\n{table(values)}{END}{after}"


def table(values: list[Value]) -> str:
    """A heading and a table for each key at the top; sections inside say what they are in a line of their own."""
    lines: list[str] = []
    for value in values:
        if value.is_section and len(value.path) == 1:
            lines += ["", f"### `{value.path[0]}`", ""]
            lines += [value.description, ""] if value.description else []
            lines += ["| value | default | |", "|---|---|---|"]
        elif value.is_section:
            if value.description:
                lines.append(f"| **`{'.'.join(value.path)}`** | | {_cell(value.description)} |")
        else:
            if not lines:
                lines += ["", "| value | default | |", "|---|---|---|"]
            default = json.dumps(value.default, ensure_ascii=False)
            lines.append(f"| `{'.'.join(value.path)}` | `{default}` | {_cell(value.description)} |")
    return "\n".join([*lines, "", ""])


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


def described(schema: dict[str, Any], values: list[Value]) -> dict[str, Any]:
    """The schema with the comments as its descriptions. What several values share is described once."""
    for value in values:
        node, is_shared = schema, False
        for name in value.path:
            if "$ref" in node:
                node, is_shared = schema["$defs"][node["$ref"].removeprefix("#/$defs/")], True
            node = node["properties"][name]
        if value.description or not is_shared:
            kept = {name: child for name, child in node.items() if name != "description"}
            node.clear()
            node.update({"description": value.description, **kept} if value.description else kept)
    return schema


def written(schema: object) -> str:
    """JSON in which what fits on a line stands on one."""
    return _json(schema, "") + "\n"


def _json(node: object, margin: str) -> str:
    line = json.dumps(node, ensure_ascii=False)
    if not isinstance(node, dict | list) or not node or len(margin) + len(line) + 20 <= _WIDTH and not _is_deep(node):
        return line
    inner = margin + "  "
    if isinstance(node, list):
        return "[\n" + ",\n".join(inner + _json(item, inner) for item in node) + f"\n{margin}]"
    items = [f"{inner}{json.dumps(name)}: {_json(child, inner)}" for name, child in node.items()]
    return "{\n" + ",\n".join(items) + f"\n{margin}}}"


def _is_deep(node: object) -> bool:
    """Whether there are objects in objects' objects: such is read in steps."""
    children = list(node.values()) if isinstance(node, dict) else node if isinstance(node, list) else []
    return any(isinstance(g, dict) for c in children if isinstance(c, dict) for g in c.values() if g)


if __name__ == "__main__":
    main()
