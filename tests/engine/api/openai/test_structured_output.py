"""Requests with a constraint: each of its names becomes the same grammar for the engine, or a reason for a 400."""

import json
from collections.abc import Callable
from typing import Any

import pytest

from quire_engine.grammar.spec import GrammarSpec

Serving = Callable[..., Any]

SCHEMA = {"type": "object", "properties": {"b": {"type": "integer"}, "a": {"type": "string"}}, "required": ["b"]}
TEXT = json.dumps(SCHEMA, separators=(",", ":"))
TAG = {"structures": [{"begin": "<f>", "schema": SCHEMA, "end": "</f>"}], "triggers": ["<f>"]}
OBJECT = '{"type":"object"}'


def spec(kind: Any, text: str, param: str, **options: Any) -> GrammarSpec:
    return GrammarSpec(kind=kind, text=text, param=param, **options)


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, None),
        ({"response_format": {"type": "text"}}, None),
        ({"response_format": None, "guided_json": None, "structured_outputs": None}, None),
        ({"response_format": {"type": "json_object"}}, spec("json_schema", OBJECT, "response_format")),
        (
            {
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {"name": "x", "schema": SCHEMA, "strict": True},
                }
            },
            spec("json_schema", TEXT, "response_format.json_schema.schema"),
        ),
        (
            {"response_format": {"type": "structural_tag", **TAG}},
            spec("structural_tag", json.dumps(TAG, separators=(",", ":")), "response_format"),
        ),
        ({"guided_json": SCHEMA}, spec("json_schema", TEXT, "guided_json")),
        ({"guided_json": TEXT}, spec("json_schema", TEXT, "guided_json")),
        ({"guided_regex": "a+"}, spec("regex", "a+", "guided_regex")),
        ({"guided_choice": ["a", "b"]}, spec("choice", '["a","b"]', "guided_choice")),
        ({"guided_grammar": 'start: "a"'}, spec("grammar", 'start: "a"', "guided_grammar")),
        ({"structured_outputs": {"json": SCHEMA}}, spec("json_schema", TEXT, "structured_outputs.json")),
        (
            {"structured_outputs": {"json": SCHEMA, "disable_any_whitespace": True}},
            spec("json_schema", TEXT, "structured_outputs.json", whitespace_pattern=""),
        ),
        (
            {"structured_outputs": {"json_object": True, "whitespace_pattern": " ?"}},
            spec("json_schema", OBJECT, "structured_outputs.json_object", whitespace_pattern=" ?"),
        ),
        ({"structured_outputs": {"regex": "a+"}}, spec("regex", "a+", "structured_outputs.regex")),
        ({"structured_outputs": {"choice": ["a"]}}, spec("choice", '["a"]', "structured_outputs.choice")),
        (
            {"structured_outputs": {"grammar": 'root ::= "a"'}},
            spec("grammar", 'root ::= "a"', "structured_outputs.grammar"),
        ),
        (
            {"structured_outputs": {"structural_tag": json.dumps(TAG)}},
            spec("structural_tag", json.dumps(TAG), "structured_outputs.structural_tag"),
        ),
    ],
)
async def test_each_name_of_a_constraint_becomes_a_grammar(
    serving: Serving, fields: dict[str, Any], expected: GrammarSpec | None
) -> None:
    async with serving(says="{}") as server:
        for ask in (server.chat, server.complete):
            response = await ask(n=2, **fields)
            assert response.status_code == 200, response.text
        grammars = {stream.params.grammar for stream in server.engine.streams}
        if expected is None:
            assert grammars == {None}
        else:
            assert server.context.grammars.specs == [expected] * 2
            assert len(grammars) == 1 and None not in grammars


@pytest.mark.parametrize(
    ("fields", "param", "part"),
    [
        ({"guided_json": {"not": {"pattern": "a"}}}, "guided_json", '"not"'),
        ({"guided_json": "{"}, "guided_json", "JSON"),
        ({"guided_regex": "(("}, "guided_regex", "unclosed"),
        ({"guided_regex": "a", "guided_choice": ["b"]}, "guided_regex", "guided_choice"),
        ({"guided_regex": "a", "response_format": {"type": "json_object"}}, "guided_regex", "response_format"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": {"uniqueItems": True}}}},
            "response_format",
            '"uniqueItems"',
        ),
    ],
)
async def test_unsatisfiable_constraint_is_refused_and_counted(
    serving: Serving, fields: dict[str, Any], param: str, part: str
) -> None:
    async with serving(says="{}") as server:
        response = await server.chat(**fields)
        error = response.json()["error"]
        assert response.status_code == 400 and error["param"] == param and part in error["message"]
        assert server.engine.streams == []
        assert server.context.metrics.rejected["grammar"] == 1


LONG = '{"anyOf":[{"enum":[1234567890123456789,123456789012345678901234567890]},{"maximum":0.12345678901234567890123}]}'
FORMAT = {"type": "json_schema", "json_schema": "LONG"}
TOOL = {"name": "f", "parameters": {"properties": {"a": "LONG"}}}
TEMPLATE = "{{ (tools or []) | length }}<tool_call>{{ messages[-1].content }}"
SAYS = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 5}


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        ("chat/completions", {"response_format": {"type": "json_schema", "json_schema": {"schema": "LONG"}}}),
        ("chat/completions", {"guided_json": "LONG"}),
        ("chat/completions", {"guided_json": LONG}),
        ("chat/completions", {"structured_outputs": {"json": "LONG"}}),
        ("chat/completions", {"response_format": {"type": "structural_tag", "format": FORMAT}}),
        ("chat/completions", {"tools": [{"type": "function", "function": TOOL}], "tool_choice": "required"}),
        ("responses", {"text": {"format": {"type": "json_schema", "name": "n", "schema": "LONG"}}}),
        ("responses", {"tools": [{"type": "function", **TOOL}], "tool_choice": "required"}),
        ("messages", {"output_config": {"format": {"type": "json_schema", "schema": "LONG"}}}),
        ("messages", {"tools": [{"name": "f", "input_schema": TOOL["parameters"]}], "tool_choice": {"type": "any"}}),
    ],
    ids=lambda each: str(each)[:60],
)
async def test_numbers_of_a_schema_keep_their_digits(serving: Serving, path: str, fields: dict[str, Any]) -> None:
    says = {"input": "hi"} if path == "responses" else SAYS
    body = json.dumps({"model": "demo", "temperature": "TEMPERATURE", **says, **fields}).replace('"LONG"', LONG)
    async with serving(says="{}", template=TEMPLATE, max_model_len=4096) as server:
        response = await server.http.post(
            f"/v1/{path}",
            content=body.replace('"TEMPERATURE"', "0.70000000000000000000001"),
            headers={"content-type": "application/json"},
        )
        assert response.status_code == 200, response.text
        assert LONG in server.context.grammars.specs[0].text
