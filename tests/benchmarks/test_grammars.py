"""The benchmark of JSON schemas reads collections and judges their instances."""

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks.serving.json_schemas import Grammars, Instance, SchemaCase, Tally, read_schemas

PERSON: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 8},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
    },
    "required": ["name", "age"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def grammars() -> Grammars:
    return Grammars()


def test_three_shapes_of_files_are_read(tmp_path: Path) -> None:
    tests = [{"description": "d", "data": 1, "valid": True}]
    (tmp_path / "a---1.json").write_text(json.dumps({"schema": {"type": "integer"}, "tests": tests}))
    (tmp_path / "b.json").write_text(json.dumps([{"schema": {}, "tests": tests}, {"schema": False, "tests": []}]))
    (tmp_path / "c.json").write_text(json.dumps(PERSON))
    (tmp_path / "d.json").write_text("no JSON")
    found = {case.name: (case.schema, len(case.instances)) for case in read_schemas(tmp_path)}
    assert found == {
        "a---1": ({"type": "integer"}, 1),
        "b#0": ({}, 1),
        "b#1": (False, 0),
        "c": (PERSON, 0),
    }


def test_a_tally_counts_right_and_wrong_instances(grammars: Grammars) -> None:
    instances = [Instance(value={"name": "a", "age": 1}, valid=True), Instance(value={"name": "a"}, valid=True)]
    instances.append(Instance(value={"name": "a", "age": 2}, valid=False))
    tally = Tally()
    tally.add(SchemaCase(name="p", schema=PERSON, instances=instances), grammars)
    tally.add(SchemaCase(name="q", schema={"not": {"pattern": "a"}}), grammars)
    assert (tally.schemas, tally.accepted, tally.right) == (2, 1, 1)
    assert (tally.valid_refused, tally.invalid_accepted, dict(tally.refusals)) == (["p 1"], ["p 2"], {"not": 1})
