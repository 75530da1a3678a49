"""Schemas allow the values that jsonschema_rs finds valid, and unions, names and strings are exact."""

import json
import random
import re
from collections.abc import Callable
from itertools import permutations
from typing import Any

import jsonschema_rs
import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire_engine.grammar.spec import GrammarError

Compile = Callable[..., str]
Accepts = Callable[[str, str], bool]
RandomAnswer = Callable[[str, random.Random, int], str | None]

VALUES: tuple[Any, ...] = (
    *(None, True, False, 0, 1, 2, 5, -1, 1.5, "", "a", "abc", "x-a"),
    *([], [1], [1, "a"], [None, None, None], {}, {"a": 1}, {"b": "x"}, {"a": "x", "b": 2}, {"x-c": 1, "a": None}),
)
NAMES = st.sampled_from(["a", "b", "x-c"])
TYPES = st.sampled_from(["null", "boolean", "object", "array", "number", "integer", "string"])
DEFINITIONS = {
    "integer": {"type": "integer"},
    "a": {"type": "object", "properties": {"a": {"const": 1}}, "required": ["a"]},
    "list": {"type": "array", "items": {"anyOf": [{"$ref": "#/$defs/list"}, {"type": "integer"}]}},
}
LEAVES = st.one_of(
    TYPES.map(lambda name: {"type": name}),
    st.sampled_from(list(DEFINITIONS)).map(lambda name: {"$ref": f"#/$defs/{name}"}),
    st.lists(st.sampled_from(VALUES), min_size=1, max_size=3).map(lambda values: {"enum": values}),
    st.sampled_from(["minimum", "maximum", "exclusiveMinimum", "minLength", "maxItems", "minProperties"]).map(
        lambda name: {name: 1}
    ),
    st.sampled_from(["^a", "c$", "^(|abc)$"]).map(lambda pattern: {"pattern": pattern}),
    NAMES.map(lambda name: {"required": [name]}),
)


def _keywords(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    lists = st.lists(inner, min_size=1, max_size=2)
    return st.one_of(
        st.builds(lambda name, each: {name: each}, st.sampled_from(["anyOf", "allOf", "oneOf"]), lists),
        st.builds(
            lambda name, each: {name: each},
            st.sampled_from(["items", "additionalProperties", "propertyNames", "not"]),
            inner,
        ),
        lists.map(lambda each: {"prefixItems": each}),
        st.dictionaries(NAMES, inner, max_size=2).map(lambda each: {"properties": each}),
        inner.map(lambda each: {"patternProperties": {"^x-": each}}),
        st.builds(lambda one, other: {**one, **other}, inner, inner),
    )


SCHEMAS = st.recursive(LEAVES, _keywords, max_leaves=6)
REASONS = (
    'the keyword "(not|oneOf|propertyNames)" is not supported.*|it allows no value|propertyNames: .*'
    "|patternProperties: .*|a schema refers to itself.*"
)


def spellings(value: Any) -> list[str]:
    """Return a value as JSON, with its properties in every order."""
    orders = [dict(order) for order in permutations(value.items())] if isinstance(value, dict) else [value]
    return [json.dumps(each) for each in orders]


@given(SCHEMAS, st.integers(0, 2**32))
def test_a_grammar_allows_what_another_validator_finds_valid(
    grammar: Compile, accepts: Accepts, random_answer: RandomAnswer, schema: Any, seed: int
) -> None:
    schema = {**schema, "$defs": DEFINITIONS}
    valid = jsonschema_rs.Draft202012Validator(schema).is_valid
    try:
        compiled = grammar("json_schema", json.dumps(schema))
    except GrammarError as error:
        assert re.fullmatch(REASONS, str(error))
        assert str(error) != "it allows no value" or not any(map(valid, VALUES))
        return
    accepted = [any(accepts(compiled, text) for text in spellings(value)) for value in VALUES]
    assert accepted == [valid(value) for value in VALUES]
    answer = random_answer(compiled, random.Random(seed), 60)
    assert answer is None or valid(json.loads(answer, parse_float=_double))


def _double(text: str) -> float:
    return min(float(text), 1e308)


A = {"type": "object", "properties": {"kind": {"const": "a"}, "v": {"type": "integer"}}, "required": ["kind", "v"]}
B = {"type": "object", "properties": {"next": {"$ref": "#/$defs/U"}, "kind": {"const": "b"}}, "required": ["kind"]}
UNION = {"A": A, "B": B, "U": {"oneOf": [{"$ref": "#/$defs/A"}, {"$ref": "#/$defs/B"}]}, "E": {"enum": ["x"]}}


@pytest.mark.parametrize(
    ("schema", "valid", "invalid"),
    [
        ({"oneOf": [{"$ref": "#/$defs/A"}, {"type": "null"}]}, ["null", '{"kind":"a","v":1}'], ['{"kind":"a"}', "1"]),
        ({"oneOf": [{"$ref": "#/$defs/E"}, {"type": "null"}]}, ["null", '"x"'], ['"y"']),
        (
            {"$ref": "#/$defs/U"},
            ['{"kind":"a","v":1}', '{"next":{"next":{"kind":"a","v":1},"kind":"b"},"kind":"b"}'],
            ['{"next":1,"kind":"b"}', '{"kind":"c"}'],
        ),
        (
            {"oneOf": [{"type": "number", "maximum": 3}, {"type": "number", "minimum": 10}]},
            ["3", "10.5"],
            ["4", '"text"'],
        ),
        (
            {"propertyNames": {"enum": ["x", "y"]}, "additionalProperties": {"type": "integer"}, "type": "object"},
            ["{}", '{"x":1,"y":2}'],
            ['{"z":1}', '{"x":"1"}'],
        ),
        (
            {"propertyNames": {"pattern": "^x"}, "properties": {"y": {}}, "type": "object"},
            ["{}", '{"x1":1}'],
            ['{"y":1}', '{"z":1}'],
        ),
        (
            {"type": "object", "properties": {"a": {"type": "integer"}}, "additionalProperties": {"type": "string"}},
            ['{"a":1,"b":"x"}', '{"b":"x"}'],
            ['{"a":1,"\\u0061":"x"}', '{"\\u0061":"x"}', '{"a":"x"}'],
        ),
        (
            {
                "patternProperties": {"^x-": {"type": "integer"}},
                "properties": {"x-a": {"minimum": 3}},
                "type": "object",
            },
            ['{"x-a":3,"x-b":1,"c":null}', "{}"],
            ['{"x-a":2}', '{"x-b":null}', '{"\\u0078-b":null}', '{"x-a":3,"x-a":1}'],
        ),
        (
            {"type": "string", "minLength": 1, "maxLength": 3},
            ['"\\u0041\\/\\b"', '"\\ud83d\\ude00\\f"', '"é😀"'],
            ['""', '"\\u0041\\u0042cd"', '"\\ud83d"', '"\\x"', '"a\nb"'],
        ),
        (
            {
                "type": "object",
                "properties": {n: {"type": "integer"} for n in "abc"},
                "minProperties": 2,
                "maxProperties": 3,
            },
            ['{"a":1,"c":1}', '{"b":1,"c":1}', '{"a":1,"z":null}', '{"a":1,"b":1,"c":1}'],
            ["{}", '{"a":1}', '{"a":1,"b":1,"c":1,"d":1}'],
        ),
        ({"prefixItems": [{"const": 1}, False], "type": "array"}, ["[]", "[1]"], ["[1,2]", "[2]"]),
        (
            {
                "type": "array",
                "prefixItems": [{"const": 1}, {"const": 2}],
                "items": {"type": "null"},
                "minItems": 1,
                "maxItems": 4,
            },
            ["[1]", "[1,2]", "[1,2,null]", "[1,2,null,null]"],
            ["[]", "[2]", "[1,2,null,null,null]", "[1,null]"],
        ),
        ({"type": "string", "uniqueItems": True, "contains": {}}, ['"a"'], ["[]"]),
        (
            {"$id": "http://x.example/s", "$ref": "t#/items", "$defs": {"t": {"$id": "t", "items": {"const": 1}}}},
            ["1"],
            ["2"],
        ),
        (
            {"$schema": "http://json-schema.org/draft-07/schema#", "$ref": "#/$defs/E", "type": "null"},
            ['"x"'],
            ["null"],
        ),
    ],
    ids=lambda each: json.dumps(each)[:60],
)
def test_a_schema_allows_exactly_its_texts(
    grammar: Compile, accepts: Accepts, schema: dict[str, Any], valid: list[str], invalid: list[str]
) -> None:
    compiled = grammar("json_schema", json.dumps({**schema, "$defs": {**UNION, **schema.get("$defs", {})}}))
    assert [text for text in valid if not accepts(compiled, text)] == []
    assert [text for text in invalid if accepts(compiled, text)] == []


@pytest.mark.parametrize(
    ("schema", "reason"),
    [
        ({"oneOf": [{"$ref": "#/$defs/A"}, {"type": "object"}]}, 'the keyword "oneOf"'),
        ({"type": "array", "uniqueItems": True}, 'the keyword "uniqueItems"'),
        ({"contains": {"type": "null"}}, 'the keyword "contains"'),
        ({"patternProperties": {"^a": {}, "b$": {}}}, "patternProperties: one name can match '^a' and 'b$'"),
        ({"$ref": "#/$defs/U/oneOf/7"}, "$ref: '#/$defs/U/oneOf/7' is not in the schema"),
        ({"$ref": "#"}, "a schema refers to itself"),
        ({"multipleOf": 123457}, "multipleOf: multiples of 123457"),
        ({"minLength": 1.5}, "minLength: should be an integer"),
        ({"required": True}, "required: should be an array"),
        ({"type": ["string", 1]}, "type: 1 is no type"),
    ],
    ids=lambda each: json.dumps(each)[:60],
)
def test_what_cannot_be_enforced_is_refused_by_name(grammar: Compile, schema: dict[str, Any], reason: str) -> None:
    with pytest.raises(GrammarError) as caught:
        grammar("json_schema", json.dumps({**schema, "$defs": UNION}))
    assert str(caught.value).startswith(reason)


@pytest.mark.parametrize(
    "keywords",
    [
        {"uniqueItems": False},
        {"propertyNames": True},
        {"propertyNames": {}},
        {"if": {"pattern": "a"}},
        {"then": {"minimum": 5}},
        {"unevaluatedProperties": True},
        {"unevaluatedItems": {}},
        {"dependentRequired": {}},
        {"dependentSchemas": {}},
        {"dependencies": {}},
        {"contains": {"type": "null"}, "minContains": 0},
    ],
    ids=str,
)
def test_keywords_without_an_effect_are_ignored(grammar: Compile, keywords: dict[str, Any]) -> None:
    assert grammar("json_schema", json.dumps({"type": "integer", **keywords})) == grammar(
        "json_schema", json.dumps({"type": "integer"})
    )
