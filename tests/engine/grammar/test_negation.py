"""Rewritten keywords allow exactly the values of the original ones, by the judgement of jsonschema_rs."""

from collections.abc import Callable
from typing import Any

import jsonschema_rs
import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire_engine.grammar.negation import rewritten

VALUES: tuple[Any, ...] = (
    *(None, True, False, 0, 1, 2, 5, -1, 1.5, "", "a", "abc", "abcdef"),
    *([], [1], [1, "a"], [None, None, None], {}, {"a": 1}, {"b": "x"}, {"a": "x", "b": 2}, {"a": None, "c": []}),
)

_NAMES = st.sampled_from(["a", "b", "c"])
_NUMBERS = st.sampled_from([0, 1, 2, 1.5])
_TYPES = st.sampled_from(["null", "boolean", "object", "array", "number", "integer", "string"])


def _keywords(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    lists = st.lists(inner, min_size=1, max_size=2)
    names = st.lists(_NAMES, min_size=1, max_size=2, unique=True)
    return st.one_of(
        st.booleans(),
        st.builds(
            lambda each: {"type": each}, st.one_of(_TYPES, st.lists(_TYPES, min_size=1, max_size=3, unique=True))
        ),
        st.builds(lambda name, each: {name: each}, st.sampled_from(["not"]), inner),
        st.builds(lambda name, each: {name: each}, st.sampled_from(["anyOf", "allOf"]), lists),
        st.builds(
            lambda name, each: {name: each},
            st.sampled_from(["minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"]),
            _NUMBERS,
        ),
        st.builds(
            lambda name, each: {name: each},
            st.sampled_from(["minLength", "maxLength", "minItems", "maxItems"]),
            st.integers(0, 4),
        ),
        st.builds(lambda each: {"required": each}, names),
        st.builds(lambda each: {"properties": each}, st.dictionaries(_NAMES, inner, max_size=2)),
        st.builds(lambda each: {"dependentRequired": each}, st.dictionaries(_NAMES, names, max_size=2)),
        st.builds(lambda each: {"dependentSchemas": each}, st.dictionaries(_NAMES, inner, max_size=2)),
        st.builds(lambda *each: dict(zip(("if", "then", "else"), each, strict=True)), inner, inner, inner),
        st.builds(lambda one, other: {**one, **other} if _both(one, other) else one, inner, inner),
    )


def _both(one: Any, other: Any) -> bool:
    return isinstance(one, dict) and isinstance(other, dict)


def supported(schema: Any) -> Any:
    """Return a schema whose keywords are rewritten at every place."""
    if isinstance(schema, list):
        return [supported(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    found = rewritten(schema)
    return {
        name: {key: supported(each) for key, each in value.items()} if name == "properties" else supported(value)
        for name, value in found.items()
    }


SCHEMAS = st.recursive(st.builds(lambda each: {"type": each}, _TYPES), _keywords, max_leaves=6)


@given(SCHEMAS)
def test_a_rewritten_schema_allows_the_same_values(schema: Any) -> None:
    original, other = (jsonschema_rs.Draft202012Validator(each) for each in (schema, supported(schema)))
    assert [other.is_valid(value) for value in VALUES] == [original.is_valid(value) for value in VALUES]


@pytest.mark.parametrize("name", ["then", "else"])
@pytest.mark.parametrize("at", [lambda schema: schema, lambda schema: {"properties": {"then": schema}}])
def test_then_and_else_without_if_are_left_out(name: str, at: Callable[[Any], Any]) -> None:
    assert supported(at({"type": "integer", name: {"minimum": 5}})) == at({"type": "integer"})


@pytest.mark.parametrize(
    "keywords",
    [
        {"uniqueItems": False},
        {"propertyNames": True},
        {"propertyNames": {}},
        {"if": {"pattern": "a"}},
        {"unevaluatedProperties": True},
        {"unevaluatedItems": {}},
        {"dependentRequired": {}},
        {"dependentSchemas": {}},
        {"dependencies": {}},
        {"minContains": 2},
        {"maxContains": 1},
        {"contains": {"type": "null"}, "minContains": 0},
    ],
    ids=str,
)
def test_keywords_without_an_effect_are_left_out(keywords: dict[str, Any]) -> None:
    assert rewritten({"title": "t", **keywords}) == {"title": "t"}


@pytest.mark.parametrize(
    "schema",
    [
        {"not": {"type": "null"}},
        {"type": "object", "not": {"required": ["a", "b"]}},
        {"not": {"anyOf": [{"type": "string"}, {"minimum": 1}]}},
        {"if": {"properties": {"a": {"type": "string"}}}, "then": {"required": ["b"]}, "else": {"maxProperties": 1}},
        {"dependencies": {"a": ["b"], "c": {"required": ["b"]}}},
    ],
    ids=lambda schema: next(iter(schema)),
)
def test_common_forms_are_rewritten(schema: Any) -> None:
    found = supported(schema)
    assert found.keys() & {"not", "if", "then", "else", "dependencies"} == set() and found["allOf"]


@pytest.mark.parametrize(
    "schema",
    [
        {"not": {"pattern": "^a"}},
        {"not": {"type": "integer"}},
        {"not": {"enum": [1]}},
        {"not": {"type": "string", "format": "email"}},
        {"if": {"pattern": "a"}, "then": {"minLength": 2}},
        {"not": {"exclusiveMinimum": True}},
    ],
    ids=str,
)
def test_negation_without_an_exact_rewrite_is_kept(schema: Any) -> None:
    assert rewritten(schema) == schema
