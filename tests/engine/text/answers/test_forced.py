"""The schemas of answers that are forced to be tool calls, and the calls that are read from them."""

import json
import re
from typing import Any

import jsonschema_rs
import pytest

from quire_engine.grammar.spec import MAX_DEPTH, GrammarError
from quire_engine.text.answers.forced import named_call, named_call_schema, required_calls, required_calls_schema
from quire_engine.text.answers.reader import AnswerParser, Arguments, CallStart, Content

NODE: dict[str, Any] = {
    "type": "object",
    "properties": {"value": {"$ref": "#/$defs/value"}, "next": {"$ref": "#"}},
    "required": ["value"],
    "$defs": {"value": {"type": "integer"}},
}
TOOLS: dict[str, dict[str, Any]] = {"push": NODE, "clear": {}}


def call(name: str, parameters: Any) -> dict[str, Any]:
    return {"name": name, "parameters": parameters}


@pytest.mark.parametrize(
    ("answer", "valid"),
    [
        ([call("push", {"value": 1, "next": {"value": 2}})], True),
        ([call("clear", {}), call("push", {"value": 1})], True),
        ([], False),
        ([call("push", {"value": "1"})], False),
        ([call("push", {"value": 1, "next": {}})], False),
        ([call("pull", {})], False),
        ([{"name": "clear"}], False),
    ],
)
def test_required_calls_are_valid_by_the_tools_own_schemas(answer: Any, valid: bool) -> None:
    several = jsonschema_rs.Draft202012Validator(required_calls_schema(TOOLS, several=True))
    assert several.is_valid(answer) == valid
    one = jsonschema_rs.Draft202012Validator(required_calls_schema(TOOLS, several=False))
    assert one.is_valid(answer) == (valid and len(answer) == 1)


def test_tool_without_parameters_accepts_an_object() -> None:
    assert named_call_schema({}) == {"type": "object"} and named_call_schema(NODE) == NODE


@pytest.mark.parametrize("depth", [MAX_DEPTH + 1, 5000])
def test_parameters_that_are_nested_too_deeply_are_refused(depth: int) -> None:
    parameters: dict[str, Any] = {}
    for _ in range(depth - 1):
        parameters = {"not": parameters}
    with pytest.raises(GrammarError):
        required_calls_schema({"push": NODE, "deep": parameters}, several=True)


@pytest.mark.parametrize("size", [1, 3, 1000])
def test_forced_calls_are_parsed_in_any_chunking(size: int) -> None:
    text = json.dumps([call("push", {"value": 1}), call("clear", {})])
    pieces = [text[start : start + size] for start in range(0, len(text), size)]
    parser = AnswerParser(required_calls)
    events = [event for piece in pieces for event in parser.feed(piece)] + parser.finish()
    names = [event.name for event in events if isinstance(event, CallStart)]
    arguments = ["".join(e.text for e in events if isinstance(e, Arguments) and e.index == i) for i in range(2)]
    assert (names, arguments) == (["push", "clear"], ['{"value": 1}', "{}"])
    assert not any(isinstance(event, Content) for event in events)
    named = AnswerParser(named_call("push"))
    found = [event for piece in pieces for event in named.feed(piece)] + named.finish()
    assert found[0] == CallStart(0, "push")
    assert "".join(event.text for event in found[1:] if isinstance(event, Arguments)) == text


@pytest.mark.parametrize("indent", [None, 1])
def test_forced_calls_that_are_cut_have_no_text(indent: int | None) -> None:
    """Every beginning of an answer, whole and streamed, has the calls that it starts, and nothing else."""
    text = json.dumps([call("push", {"value": [{"a": "]"}]}), call("clear", {})], indent=indent)
    for length in range(len(text)):
        for pieces in ([text[:length]], list(text[:length])):
            parser = AnswerParser(required_calls)
            events = [event for piece in pieces for event in parser.feed(piece)] + parser.finish()
            assert all(isinstance(event, CallStart | Arguments) for event in events)
            begun = re.findall(r'"name": "(\w+)",\s*"parameters": {\s*["}]', text[:length])
            assert [event.name for event in events if isinstance(event, CallStart)] == begun
            named = AnswerParser(named_call("push"))
            found = [event for piece in pieces for event in named.feed(piece)] + named.finish()
            assert found[0] == CallStart(0, "push") and not any(isinstance(event, Content) for event in found)
