"""The benchmarks of structured output: they read schemas, judge instances, and find answers that are not valid."""

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks.grammars.conformance import Tally, subject
from benchmarks.grammars.mask_cost import LongestMatch, synthetic_vocabulary
from benchmarks.grammars.random_answers import RandomAnswers, finite, validator
from benchmarks.grammars.schemas import BYTES, Grammars, Instance, SchemaCase, read_schemas

PERSON: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 8},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
    },
    "required": ["name", "age"],
    "additionalProperties": False,
}
SCHEMAS: tuple[dict[str, Any], ...] = (
    PERSON,
    {"enum": ["red", 7, None, {"a": [1]}]},
    {"type": "array", "items": {"type": "boolean"}, "minItems": 2, "maxItems": 4},
    {"type": "array", "prefixItems": [{"const": "x"}, PERSON], "items": False, "minItems": 2},
    {"anyOf": [{"type": "number", "exclusiveMinimum": 1, "maximum": 2}, {"type": "null"}]},
    {"oneOf": [{"type": "integer", "multipleOf": 3, "minimum": 0, "maximum": 99}, {"const": "none"}]},
    {"type": "string", "pattern": "^[a-c]{2,5}-[0-9]+$", "maxLength": 9},
    {"type": "string", "format": "ipv4"},
    {
        "$ref": "#/$defs/node",
        "$defs": {"node": {"anyOf": [{"type": "null"}, {"type": "array", "items": PERSON, "maxItems": 1}]}},
    },
    {"allOf": [PERSON, {"properties": {"age": {"maximum": 9}}}]},
)


@pytest.fixture(scope="module")
def grammars() -> Grammars:
    return Grammars()


@pytest.fixture(scope="module")
def answers() -> RandomAnswers:
    return RandomAnswers(BYTES, seed=7)


@pytest.mark.parametrize("schema", SCHEMAS, ids=range(len(SCHEMAS)))
def test_answers_from_random_logits_are_valid(
    schema: dict[str, Any], grammars: Grammars, answers: RandomAnswers
) -> None:
    judge = validator(schema)
    assert judge is not None
    found = [answers.answer(grammars.compile(schema), max_tokens=600) for _ in range(6)]
    complete = [answer for answer in found if answer is not None]
    assert complete
    assert [answer for answer in complete if not judge.is_valid(json.loads(answer))] == []


def test_an_answer_that_reaches_the_limit_counts_as_cut(grammars: Grammars, answers: RandomAnswers) -> None:
    assert answers.answer(grammars.compile({"type": "string", "minLength": 50}), max_tokens=20) is None


def test_a_grammar_of_another_schema_gives_invalid_answers(grammars: Grammars, answers: RandomAnswers) -> None:
    """The validator and the grammar are independent: it refuses answers that follow the wrong one."""
    judge = validator({"type": "object"})
    answer = answers.answer(grammars.compile({"enum": [1, 2]}), max_tokens=20)
    assert judge is not None and answer is not None and not judge.is_valid(json.loads(answer))


@pytest.mark.parametrize(
    ("text", "value"), [("1.5e2", 150.0), ("7e999", 1.7976931348623157e308), ("-7e999", -1.7976931348623157e308)]
)
def test_numbers_beyond_the_largest_are_the_largest(text: str, value: float) -> None:
    assert finite(text) == value


def test_three_shapes_of_files_are_read(tmp_path: Path) -> None:
    tests = [{"description": "d", "data": 1, "valid": True}]
    (tmp_path / "a---1.json").write_text(json.dumps({"schema": {"type": "integer"}, "tests": tests}))
    (tmp_path / "b.json").write_text(json.dumps([{"schema": {}, "tests": tests}, {"schema": False, "tests": []}]))
    (tmp_path / "c.json").write_text(json.dumps(PERSON))
    (tmp_path / "d.json").write_text("no JSON")
    found = {case.name: (case.group, case.schema, len(case.instances)) for case in read_schemas(tmp_path)}
    folder = tmp_path.name
    assert found == {
        "a---1": ("a", {"type": "integer"}, 1),
        "b#0": (folder, {}, 1),
        "b#1": (folder, False, 0),
        "c": (folder, PERSON, 0),
    }


def test_a_tally_counts_right_and_wrong_instances(grammars: Grammars) -> None:
    instances = [Instance(value={"name": "a", "age": 1}, valid=True), Instance(value={"name": "a"}, valid=True)]
    instances.append(Instance(value={"name": "a", "age": 2}, valid=False))
    tally = Tally()
    tally.add(SchemaCase(name="p", group="g", schema=PERSON, instances=instances), grammars)
    tally.add(SchemaCase(name="q", group="g", schema={"not": {"pattern": "a"}}), grammars)
    assert (tally.schemas, tally.accepted, tally.right) == (2, 1, 1)
    assert (tally.valid_refused, tally.invalid_accepted, dict(tally.refusals)) == (["p 1"], ["p 2"], {"not": 1})


@pytest.mark.parametrize(
    ("reason", "expected"),
    [
        ('the keyword "not" is not supported', "not"),
        ('the keyword "then", "if" is not supported', "if, then"),
        ("oneOf constraints are not supported. Enable 'coerce_one_of'", "oneOf"),
        ("Resource 'x' is not present", "Resource … is not present"),
    ],
)
def test_a_refusal_is_counted_by_its_keyword(reason: str, expected: str) -> None:
    assert subject(reason) == expected


def test_the_synthetic_vocabulary_has_the_size_and_writes_any_text() -> None:
    vocabulary = synthetic_vocabulary(6_000)
    text = 'a {"b": "é\n"}'.encode()
    ids = LongestMatch(vocabulary).encode(text)
    assert len(vocabulary.tokens) == len(set(vocabulary.tokens)) == 6_000
    assert b"".join(vocabulary.tokens[number] for number in ids) == text
