"""Answers that vLLM's public parser tests contain, with the results that those tests expect.

The texts and the results are facts from tests/tool_parsers and tests/reasoning of vllm-project/vllm (Apache-2.0), from
which no code is copied. Every answer is read whole and in pieces of several sizes. ``DIFFERENT`` has the answers that
quire reads otherwise, each with the reason; docs/openai-compatibility.md describes them.
"""

import json
from typing import Any

import pytest
from read_answer import Answer, read

from quire_engine.text.answers.formats import formats_of
from quire_engine.text.answers.reader import Schemas

Calls = list[tuple[str, Any]]
Case = tuple[str, str, str, Calls]
"""The parser, the answer, the content, and the calls."""

FIELDS = {
    "string_field": "string",
    "int_field": "integer",
    "float_field": "number",
    "bool_field": "boolean",
    "null_field": "null",
    "array_field": "array",
    "object_field": "object",
    "quoted": "string",
    "path": "string",
    "newline": "string",
}
SCHEMAS: Schemas = {
    "test_function": {"type": "object", "properties": {name: {"type": type} for name, type in FIELDS.items()}}
}
V3 = "<｜tool▁call▁begin｜>function<｜tool▁sep｜>{}\n```json\n{}\n```<｜tool▁call▁end｜>"
TYPES = {
    "string_field": "hello",
    "int_field": 42,
    "float_field": 3.14,
    "bool_field": True,
    "null_field": None,
    "array_field": ["a", "b", "c"],
    "object_field": {"nested": "value"},
}
ESCAPED = {"quoted": 'He said "hello"', "path": "C:\\Users\\file.txt", "newline": "line1\nline2"}
TOKYO = {"city": "Tokyo"}
UNIT = {"city": "Tokyo", "unit": "celsius"}
SF = {"city": "San Francisco", "state": "CA", "unit": "celsius"}
LA = ("get_weather", {"city": "LA", "metric": "C"})


def v3(*calls: tuple[str, Any]) -> str:
    """Return calls in the form of DeepSeek V3."""
    body = "".join(V3.format(name, json.dumps(arguments)) for name, arguments in calls)
    return f"<｜tool▁calls▁begin｜>{body}<｜tool▁calls▁end｜>"


def coder(name: str, **parameters: str) -> str:
    """Return a call in the form of Qwen3-Coder, with values on the line of their tags."""
    lines = "".join(f"<parameter={key}>{value}</parameter>\n" for key, value in parameters.items())
    return f"<tool_call>\n<function={name}>\n{lines}</function>\n</tool_call>"


def as_coder_writes(value: Any) -> str:
    """Return a value as Qwen3-Coder writes it: text as it is, anything else as JSON."""
    return value if isinstance(value, str) else json.dumps(value)


def gemma4(name: str, arguments: str) -> str:
    """Return a call in the form of Gemma 4, whose quotes are tags."""
    quoted = arguments.replace("'", '<|"|>')
    return f"<|tool_call>call:{name}{{{quoted}}}<tool_call|>"


def functiongemma(name: str, arguments: str) -> str:
    """Return a call in the form of FunctionGemma, whose quotes are tags."""
    quoted = arguments.replace("'", "<escape>")
    return f"<start_function_call>call:{name}{{{quoted}}}<end_function_call>"


QWEN3_XML: list[Case] = [
    ("qwen3_xml", coder("get_weather", city="Tokyo"), "", [("get_weather", TOKYO)]),
    (
        "qwen3_xml",
        coder("get_weather", city="Tokyo") + coder("get_time", timezone="Asia/Tokyo"),
        "",
        [("get_weather", TOKYO), ("get_time", {"timezone": "Asia/Tokyo"})],
    ),
    (
        "qwen3_xml",
        coder("test_function", **{name: as_coder_writes(value) for name, value in TYPES.items()}),
        "",
        [("test_function", TYPES)],
    ),
    ("qwen3_xml", coder("refresh"), "", [("refresh", {})]),
    (
        "qwen3_xml",
        f"Let me check the weather for you.\n\n{coder('get_weather', city='Tokyo')}\n\nI will get that information.",
        "Let me check the weather for you.",
        [("get_weather", TOKYO)],
    ),
    ("qwen3_xml", coder("test_function", **ESCAPED), "", [("test_function", ESCAPED)]),
]
GLM: list[Case] = [
    ("glm47", "<tool_call>get_current_date</tool_call>", "", [("get_current_date", {})]),
    ("glm47", "<tool_call>get_current_date\n</tool_call>", "", [("get_current_date", {})]),
    (
        "glm47",
        "<tool_call>get_weather<arg_key>city</arg_key><arg_value>Beijing</arg_value></tool_call>",
        "",
        [("get_weather", {"city": "Beijing"})],
    ),
    (
        "glm47",
        "<tool_call>get_weather\n<arg_key>city</arg_key>\n<arg_value>Beijing</arg_value>\n</tool_call>",
        "",
        [("get_weather", {"city": "Beijing"})],
    ),
    ("glm47", "Checking.<tool_call>get_current_date</tool_call>", "Checking.", [("get_current_date", {})]),
    (
        "glm47",
        "<tool_call>get_weather<arg_key>city</arg_key><arg_value>Beijing</arg_value></tool_call>"
        "<tool_call>get_weather<arg_key>city</arg_key><arg_value>Shanghai</arg_value></tool_call>",
        "",
        [("get_weather", {"city": "Beijing"}), ("get_weather", {"city": "Shanghai"})],
    ),
    ("glm47", "  \n  <tool_call>get_current_date</tool_call>", "", [("get_current_date", {})]),
]
WINDOWS = {"text": 'He said "hello"', "path": "C:\\Users\\file", "newline": "line1\nline2"}
HOTELS = ("search_hotels", {"location": "Tokyo", "check_in": "2025-01-15"})
EMPTY = {**TYPES, "empty_array": [], "empty_object": {}}
DEEPSEEK: list[Case] = [
    ("deepseek_v3", v3(("get_weather", UNIT)), "", [("get_weather", UNIT)]),
    ("deepseek_v3", v3(("get_weather", UNIT), HOTELS), "", [("get_weather", UNIT), HOTELS]),
    ("deepseek_v3", v3(("test_function", EMPTY)), "", [("test_function", EMPTY)]),
    ("deepseek_v3", v3(("get_current_time", {})), "", [("get_current_time", {})]),
    (
        "deepseek_v3",
        "Let me check the weather for you." + v3(("get_weather", {"city": "Paris"})),
        "Let me check the weather for you.",
        [("get_weather", {"city": "Paris"})],
    ),
    ("deepseek_v3", v3(("send_message", WINDOWS)), "", [("send_message", WINDOWS)]),
    (
        "deepseek_v31",
        'normal text<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>foo<｜tool▁sep｜>{"x":1}<｜tool▁call▁end｜>'
        "<｜tool▁calls▁end｜>",
        "normal text",
        [("foo", {"x": 1})],
    ),
]
GEMMA: list[Case] = [
    ("gemma4", gemma4("get_weather", "location:'London'"), "", [("get_weather", {"location": "London"})]),
    (
        "gemma4",
        gemma4("get_weather", "location:'San Francisco',unit:'celsius'"),
        "",
        [("get_weather", {"location": "San Francisco", "unit": "celsius"})],
    ),
    ("gemma4", gemma4("f", "location:'Paris, France'"), "", [("f", {"location": "Paris, France"})]),
    (
        "gemma4",
        "Let me check the weather for you. " + gemma4("get_weather", "location:'Paris'"),
        "Let me check the weather for you.",
        [("get_weather", {"location": "Paris"})],
    ),
    (
        "gemma4",
        gemma4("get_weather", "location:'London'") + gemma4("get_time", "location:'London'"),
        "",
        [("get_weather", {"location": "London"}), ("get_time", {"location": "London"})],
    ),
    (
        "gemma4",
        gemma4("complex_function", "nested:{inner:'value'},list:['a','b']"),
        "",
        [("complex_function", {"nested": {"inner": "value"}, "list": ["a", "b"]})],
    ),
    (
        "gemma4",
        gemma4("set_status", "is_active:true,count:42,score:3.14"),
        "",
        [("set_status", {"is_active": True, "count": 42, "score": 3.14})],
    ),
    ("gemma4", gemma4("f", "flag:false,param:null"), "", [("f", {"flag": False, "param": None})]),
    ("gemma4", gemma4("f", "record_map:{'3':'new text'}"), "", [("f", {"record_map": {"3": "new text"}})]),
    ("gemma4", gemma4("f", "outer:{inner:{'3':'x'}}"), "", [("f", {"outer": {"inner": {"3": "x"}}})]),
    ("gemma4", gemma4("f", "a:[['a]b','c'],'tail']"), "", [("f", {"a": [["a]b", "c"], "tail"]})]),
    ("gemma4", gemma4("get-weather", "location:'London'"), "", [("get-weather", {"location": "London"})]),
    ("gemma4", gemma4("weather.get", "location:'London'"), "", [("weather.get", {"location": "London"})]),
    ("gemma4", gemma4("get_status", ""), "", [("get_status", {})]),
    (
        "functiongemma",
        functiongemma("get_weather", "location:'San Francisco',unit:'celsius'"),
        "",
        [("get_weather", {"location": "San Francisco", "unit": "celsius"})],
    ),
    (
        "functiongemma",
        functiongemma("get_weather", "location:'London'") + functiongemma("get_time", "timezone:'UTC'"),
        "",
        [("get_weather", {"location": "London"}), ("get_time", {"timezone": "UTC"})],
    ),
    (
        "functiongemma",
        functiongemma("search", "query:'python'limit:'10'sort:'relevance'"),
        "",
        [("search", {"query": "python", "limit": 10, "sort": "relevance"})],
    ),
    (
        "functiongemma",
        functiongemma("f", "count:'42',enabled:'true',message:'Hello World'"),
        "",
        [("f", {"count": 42, "enabled": True, "message": "Hello World"})],
    ),
]
HERMES: list[Case] = [
    (
        "hermes",
        '<tool_call>{"name": "get_current_temperature","arguments": {"location":"San Francisco, California, '
        'United States", "unit": "celsius"}}</tool_call>',
        "",
        [("get_current_temperature", {"location": "San Francisco, California, United States", "unit": "celsius"})],
    ),
    (
        "hermes",
        'Sure, let me check the weather.<tool_call>{"name": "get_weather", "arguments": {"city": "NYC"}}</tool_call>',
        "Sure, let me check the weather.",
        [("get_weather", {"city": "NYC"})],
    ),
    (
        "hermes",
        '<tool_call>\n{"name": "get_db_config", "arguments": "{\\"param\\": \\"max_connections\\"}"}\n</tool_call>',
        "",
        [("get_db_config", {"param": "max_connections"})],
    ),
    ("hermes", '<tool_call>\n{"name": "do_thing", "arguments": "hello"}\n</tool_call>', "", [("do_thing", "hello")]),
]
ADD = ("add", {"a": 3.5, "b": 4})
WEATHER = ("get_current_weather", SF)
MISTRAL: list[Case] = [
    ("mistral", f'[TOOL_CALLS] [{{"name": "get_current_weather", "arguments":{json.dumps(SF)}}}]', "", [WEATHER]),
    ("mistral", f'[TOOL_CALLS] [{{"arguments":{json.dumps(SF)}, "name": "get_current_weather"}}]', "", [WEATHER]),
    (
        "mistral",
        '[TOOL_CALLS] [{"name": "add", "arguments": {"a": 3.5, "b": 4}}, '
        f'{{"name": "get_current_weather", "arguments":{json.dumps(SF)}}}]',
        "",
        [ADD, WEATHER],
    ),
    ("mistral", '[TOOL_CALLS]add_this_and_that{"a": 3.5, "b": 4}', "", [("add_this_and_that", {"a": 3.5, "b": 4})]),
    ("mistral", f"[TOOL_CALLS]get_current_weather{json.dumps(SF)}", "", [WEATHER]),
    (
        "mistral",
        '[TOOL_CALLS]add{"a": 3.5, "b": 4}[TOOL_CALLS]multiply{"a": 3, "b": 6}',
        "",
        [ADD, ("multiply", {"a": 3, "b": 6})],
    ),
]
USER = {
    "name": "Doe",
    "age": 9,
    "address": {"city": "LA", "state": "CA"},
    "role": None,
    "passed_test": True,
    "aliases": ["John", "Johnny"],
}
PYTHONIC: list[Case] = [
    ("llama4_pythonic", "[get_weather(city='LA', metric='C')]", "", [LA]),
    (
        "llama4_pythonic",
        "[register_user(name='Doe', age=9, address={'city': 'LA', 'state': 'CA'}, role=None, passed_test=True, "
        "aliases=['John', 'Johnny'])]",
        "",
        [("register_user", USER)],
    ),
    (
        "llama4_pythonic",
        "[do_something_cool(additional_data={})]",
        "",
        [("do_something_cool", {"additional_data": {}})],
    ),
    ("llama4_pythonic", "[do_something_cool(steps=[])]", "", [("do_something_cool", {"steps": []})]),
    (
        "llama4_pythonic",
        "<|python_start|>[get_weather(city='LA', metric='C'),register_user(name='Doe', age=9)]",
        "",
        [LA, ("register_user", {"name": "Doe", "age": 9})],
    ),
    (
        "llama4_pythonic",
        "<|python_start|>[get_weather(city='LA', metric='C'), get_weather(), do_something_cool(steps=[])]"
        "<|python_end|>",
        "",
        [LA, ("get_weather", {}), ("do_something_cool", {"steps": []})],
    ),
]
CASES = [*QWEN3_XML, *GLM, *DEEPSEEK, *GEMMA, *HERMES, *MISTRAL, *PYTHONIC]

PART, REST = "This is a reasoning section", "This is the rest"
REASONING = [
    # test_gemma4_reasoning_parser.py
    ("gemma4", "This is content", "", "This is content"),
    ("gemma4", f"<|channel>{PART}<channel|>{REST}", PART, REST),
    ("gemma4", f"<|channel>{PART}<channel|>", PART, ""),
    ("gemma4", "<|channel>This\nThat<channel|>This is the rest\nThat", "This\nThat", "This is the rest\nThat"),
    ("gemma4", f"<|channel>{PART}", PART, ""),
    ("gemma4", "", "", ""),
    (
        "gemma4",
        "<|channel>thought\nActual reasoning here<channel|>Final answer",
        "Actual reasoning here",
        "Final answer",
    ),
    ("gemma4", "<|channel>thought\n<channel|>", "", ""),
    ("gemma4", "<|channel>thought\nLine1\nLine2<channel|>Answer", "Line1\nLine2", "Answer"),
    ("gemma4", "<|channel>thousand reasons<channel|>Done", "thousand reasons", "Done"),
    ("gemma4", "<|tool_call>", "", "<|tool_call>"),
    # test_seedoss_reasoning_parser.py
    ("seed_oss", f"{PART}</seed:think>{REST}", PART, REST),
    ("seed_oss", f"{PART}</seed:think>", PART, ""),
    ("seed_oss", "This is content", "This is content", ""),
    ("seed_oss", "This\nThat</seed:think>This is the rest\nThat", "This\nThat", "This is the rest\nThat"),
    ("seed_oss", f"<seed:think>{PART}</seed:think>{REST}", PART, REST),
    # test_mistral_reasoning_parser.py
    ("mistral", f"[THINK]{PART}[/THINK]{REST}", PART, REST),
    ("mistral", f"[THINK]{PART}[/THINK]", PART, ""),
    ("mistral", "[THINK]This\nThat[/THINK]This is the rest\nThat", "This\nThat", "This is the rest\nThat"),
    ("mistral", f"[THINK]{PART}", PART, ""),
    ("mistral", f"\n[THINK]{PART}[/THINK]\n{REST}", PART, f"\n{REST}"),
]


def answer(tools: str, reasoning: str, pieces: list[str]) -> Answer:
    """Return content, reasoning and calls of an answer that arrives in pieces."""
    parser = formats_of(None, tools, reasoning).parser("", SCHEMAS)
    assert parser is not None
    return read(parser, pieces)


def cut(text: str) -> list[list[str]]:
    """Return the text whole and in pieces of 1, 2, 3, 5 and 8 characters."""
    return [[text], *([text[at : at + size] for at in range(0, len(text), size)] for size in (1, 2, 3, 5, 8))]


@pytest.mark.parametrize(("name", "text", "content", "calls"), CASES)
def test_calls_equal_those_of_vllm(name: str, text: str, content: str, calls: Calls) -> None:
    for pieces in cut(text):
        assert answer(name, "none", pieces) == (content, "", calls)


@pytest.mark.parametrize(("name", "text", "reasoning", "content"), REASONING)
def test_reasoning_equals_that_of_vllm(name: str, text: str, reasoning: str, content: str) -> None:
    for pieces in cut(text):
        assert answer("none", name, pieces) == (content, reasoning, [])


DIFFERENT: list[tuple[str, str, tuple[str, str], Calls, str]] = [
    (
        "gemma4",
        '<|tool_call>call:get_weather{location:<|"|>London',
        ("", ""),
        [("get_weather", {"location": "London"})],
        "a call that is cut stays a call, because a stream cannot take it back; vLLM returns text",
    ),
    (
        "mistral",
        '[TOOL_CALLS]  junk [{"name": "add", "arguments":{"a": 1, "b": 2}}] trail',
        ('  junk [{"name": "add", "arguments":{"a": 1, "b": 2}}] trail', ""),
        [],
        "text after the tag that is no call is text; vLLM searches it for calls where it is not streamed",
    ),
    (
        "mistral",
        "[TOOL_CALLS] not json at all",
        (" not json at all", ""),
        [],
        "white space after a tag is text where no call follows; vLLM strips such an answer",
    ),
    *(
        (
            "llama4_pythonic",
            f"<|python_start|>[{invalid}, get_weather(city='LA', metric='C')]<|python_end|>",
            (invalid, ""),
            [LA],
            "a call whose values JSON cannot express is text between the others; vLLM drops it",
        )
        for invalid in ("bad(x=b'z')", "calc(x=1e999)")
    ),
]


@pytest.mark.parametrize(("name", "text", "said", "calls", "reason"), DIFFERENT)
def test_differences_are_the_documented_ones(
    name: str, text: str, said: tuple[str, str], calls: Calls, reason: str
) -> None:
    assert reason
    for pieces in cut(text):
        assert answer(name, "none", pieces) == (*said, calls)
