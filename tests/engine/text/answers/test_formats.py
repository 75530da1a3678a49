"""Each format finds the calls, the content and the reasoning of an answer, however its text is cut.

Outputs and expected calls marked "vLLM" are facts taken from vLLM's public parser tests (Apache-2.0, tests/tool_parsers
and tests/reasoning of vllm-project/vllm), from which no code is copied. quire differs from them where an answer cannot
be judged before it has ended: see docs/openai-compatibility.md.
"""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from read_answer import Answer, events_of, read

from quire_engine.text.answers.formats import (
    REASONING_FORMATS,
    REASONING_NAMES,
    TOOL_FORMATS,
    TOOL_NAMES,
    AnswerFormats,
    ReasoningFormat,
    formats_of,
)
from quire_engine.text.answers.reader import AnswerParser, Reasoning, Schemas

SCHEMAS: Schemas = {
    "typed": {
        "type": "object",
        "properties": {
            "i": {"type": "integer"},
            "f": {"type": "number"},
            "b": {"type": "boolean"},
            "s": {"type": "string"},
            "o": {"type": "object"},
            "n": {"anyOf": [{"type": "integer"}, {"type": "null"}]},
            "t": {"type": ["string", "null"]},
            "e": {"enum": ["1", "2"]},
            "u": {"type": ["string", "number"]},
        },
    }
}


def parser_of(tools: str = "none", reasoning: str = "none", prompt: str = "") -> AnswerParser:
    parser = formats_of(None, tools, reasoning).parser(prompt, SCHEMAS)
    assert parser is not None
    return parser


HERMES = '<tool_call>\n{"name": "final_answer", "arguments": {"trigger": true}}'
V3 = "<｜tool▁call▁begin｜>function<｜tool▁sep｜>{}\n```json\n{}\n```<｜tool▁call▁end｜>"
DALLAS = (
    "<function=get_current_weather>\n<parameter=city>\nDallas\n</parameter>\n<parameter=state>\nTX\n</parameter>\n"
    "</function>"
)
GLM = "<tool_call>get_weather\n<arg_key>city</arg_key>\n<arg_value>Beijing</arg_value>\n</tool_call>"

CALLS: list[tuple[str, str, str, list[tuple[str, Any]]]] = [
    # vLLM: test_hermes_tool_parser.py
    ("hermes", HERMES + "\n</tool_call>", "", [("final_answer", {"trigger": True})]),
    ("hermes", HERMES, "", [("final_answer", {"trigger": True})]),
    (
        "hermes",
        '<tool_call>{"name": "search", "arguments": {"q": "cats"}}</tool_call>'
        '<tool_call>{"name": "search", "arguments": {"q": "dogs"}}</tool_call>',
        "",
        [("search", {"q": "cats"}), ("search", {"q": "dogs"})],
    ),
    ("hermes", '<tool_call>{"name": "f", "arguments": "{hello world}"}</tool_call>', "", [("f", "{hello world}")]),
    ("hermes", '<tool_call>{"name": "f", "arguments": "{\\"a\\": 1} x"}</tool_call>', "", [("f", '{"a": 1} x')]),
    # further cases
    (
        "hermes",
        '<tool_call>{"arguments": {"y": "}</tool_call>"}, "name": "g"}</tool_call>',
        "",
        [("g", {"y": "}</tool_call>"})],
    ),
    (
        "hermes",
        '<tool_call>[{"name": "f", "arguments": {}}, {"name": "g", "arguments": null}]</tool_call>',
        "",
        [("f", {}), ("g", {})],
    ),
    ("hermes", "a <tool_call>nonsense</tool_call> b ", "a <tool_call>nonsense</tool_call> b ", []),
    ("hermes", "2 < 3 and <tool", "2 < 3 and <tool", []),
    ("hermes", "Use the <tool_call> tag", "Use the <tool_call> tag", []),
    ("hermes", "<tool_call>\n[1, 2]", "<tool_call>\n[1, 2]", []),
    ("hermes", '<tool_call> [ {"a": 1}]', '<tool_call> [ {"a": 1}]', []),
    ("hermes", '<tool_call>{"name": "f", "arguments": {"a": "b', "", [("f", ("invalid", '{"a": "b'))]),
    ("hermes", '<tool_call>{"name": "\\ud83d", "arguments": {}}</tool_call>', "", [("\ufffd", {})]),
    (
        "hermes",
        '<tool_call>{"name": "f", "arguments": "{\\"a\\": \\"\\ud83d!\\"}"}</tool_call>',
        "",
        [("f", {"a": "\ufffd!"})],
    ),
    *(
        (
            "hermes",
            f'<tool_call>{{"name": "f", "arguments": {{"a": "{written}"}}}}</tool_call>',
            "",
            [("f", {"a": value})],
        )
        for written, value in (
            (r"\ud83d!", "\ufffd!"),
            (r"\uDE00", "\ufffd"),
            (r"\ud83d\ude00\ud83d\n", "😀\ufffd\n"),
            (r"\\ud83d \\\ud83d", "\\ud83d \\\ufffd"),
        )
    ),
    (
        "hermes",
        r'<tool_call>{"name": "f", "arguments": {"a": "\ud83d\ude',
        "",
        [("f", ("invalid", r'{"a": "\ufffd\ude'))],
    ),
    (
        "hermes",
        '<tool_call>\n{"name": "f", "arguments": {}}\n{"name": "g", "arguments": {"a": 1}}\n</tool_call> bye',
        "",
        [("f", {}), ("g", {"a": 1})],
    ),
    ("hermes", '<tool_call>{"name": "f", "arguments": {}}}</tool_call>', "", [("f", {})]),
    # a call that cannot be read after one that can
    *(
        (name, f"a {call}{invalid}{call}", f"a{invalid}", [("g", {})] * 2)
        for name, call, invalid in (
            ("hermes", '<tool_call>{"name": "g", "arguments": {}}</tool_call>', '<tool_call>{"name": x}</tool_call>'),
            ("qwen3_coder", "<tool_call><function=g></function></tool_call>", "<tool_call>oops</tool_call>"),
            ("glm45", "<tool_call>g</tool_call>", "<tool_call>two words</tool_call>"),
            ("functiongemma", "<start_function_call>call:g{}<end_function_call>", "<start_function_call>call:{}"),
            ("gemma4", "<|tool_call>call:g{}<tool_call|>", "<|tool_call>g{}<tool_call|>"),
            (
                "deepseek_v31",
                "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>g<｜tool▁sep｜>{}<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
                "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>g<｜tool▁call▁end｜>",
            ),
        )
    ),
    (
        "deepseek_v31",
        "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>f<｜tool▁sep｜>{}<｜tool▁call▁end｜><｜tool▁call▁begin｜>oops"
        "<｜tool▁call▁begin｜>g<｜tool▁sep｜>{}<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
        "<｜tool▁call▁begin｜>oops",
        [("f", {}), ("g", {})],
    ),
    (
        "deepseek_v31",
        "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>f<｜tool▁call▁end｜>",
        "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>f<｜tool▁call▁end｜>",
        [],
    ),
    ("mistral", "[TOOL_CALLS]f{}[TOOL_CALLS] oops", " oops", [("f", {})]),
    ("mistral", '[TOOL_CALLS][{"name": "f", "arguments": {}}, {"x": 1}]', '{"x": 1}]', [("f", {})]),
    ("llama3_json", '{"name": "f", "parameters": {}}; {"name": "g"}', '{"name": "g"}', [("f", {})]),
    # vLLM: test_llama3_json_tool_parser.py
    (
        "llama3_json",
        '{"name": "searchTool", "parameters": {"query": "x", "limit": 10}}',
        "",
        [("searchTool", {"query": "x", "limit": 10})],
    ),
    (
        "llama3_json",
        '{"name": "invalidTool", "parameters": {invalid json}',
        '{"name": "invalidTool", "parameters": {invalid json}',
        [],
    ),
    ("llama3_json", '{"name": "searchTool", "arguments": {"query": "x"}}', "", [("searchTool", {"query": "x"})]),
    (
        "llama3_json",
        '{"name": "a", "parameters": {"query": "1"}} ; {"name": "b", "parameters": {}}; '
        '{"name": "c", "parameters": {"q": {"r": [1]}}}',
        "",
        [("a", {"query": "1"}), ("b", {}), ("c", {"q": {"r": [1]}})],
    ),
    (
        "llama3_json",
        '{"name": "a", "parameters": {"q": "t {v} [c]", "n": "He said \\"{\\""}}',
        "",
        [("a", {"q": "t {v} [c]", "n": 'He said "{"'})],
    ),
    ("llama3_json", '{"parameters": {}}', '{"parameters": {}}', []),
    ("llama3_json", '{"name": "toolWithoutParams"}', '{"name": "toolWithoutParams"}', []),
    ("llama3_json", '{"name": "s", "parameters": {"q": "t"}} The arguments were {"q": "t"}', "", [("s", {"q": "t"})]),
    ("llama3_json", '<|python_tag|>{"name": "s", "parameters": {}}', "", [("s", {})]),
    (
        "llama3_json",
        'Hi [{"name": "f", "parameters": {}}, {"name": "g", "parameters": {"a": [1]}}]',
        "Hi",
        [("f", {}), ("g", {"a": [1]})],
    ),
    ("llama3_json", 'Hi [1, {"a": [2]}] ', 'Hi [1, {"a": [2]}] ', []),
    # vLLM: test_mistral_tool_parser.py
    (
        "mistral",
        'Hello[TOOL_CALLS] [{"name": "add", "arguments": {"a": 1}}, {"name": "w", "arguments":{"c": "SF"}}]\nextra',
        "Hello",
        [("add", {"a": 1}), ("w", {"c": "SF"})],
    ),
    ("mistral", "a [TOOL_CALLS] word", "a  word", []),
    ("mistral", "a[TOOL_CALLS]\n[1]", "a\n[1]", []),
    ("mistral", '[TOOL_CALLS]add[CALL_ID]abcdefghi[ARGS]{"a": 3.5}', "", [("add", {"a": 3.5})]),
    # vLLM: test_pythonic_tool_parser.py
    (
        "pythonic",
        r"[w(city='Martha\'s Vineyard', metric='\"cool units\"')]",
        "",
        [("w", {"city": "Martha's Vineyard", "metric": '"cool units"'})],
    ),
    ("pythonic", "[g(), f(a='x 'y', b='z')]", "f(a='x 'y', b='z')]", [("g", {})]),
    ("pythonic", "[f(a='x 'y' 'z), g(b='p 'q' 'r)]", "[f(a='x 'y' 'z), g(b='p 'q' 'r)]", []),
    ("pythonic", "<|python_start|>[g()]<|python_end|>", "", [("g", {})]),
    ("pythonic", "[1] is a list", "[1] is a list", []),
    (
        "pythonic",
        "[f(a=true, b=[null, {'c': false}], d=(1, -2), e=None)]",
        "",
        [("f", {"a": True, "b": [None, {"c": False}], "d": [1, -2], "e": None})],
    ),
    (
        "pythonic",
        "[g(), w(a='x\ny\r\n', b=\"it's\\n\nz\")]",
        "",
        [("g", {}), ("w", {"a": "x\ny\r\n", "b": "it's\n\nz"})],
    ),
    (
        "pythonic",
        "[f(from=1, class = 'in=2', user-id='x, if=3')]",
        "",
        [("f", {"from": 1, "class": "in=2", "user-id": "x, if=3"})],
    ),
    *(
        ("pythonic", f"[g(), {call}, h(), ]", call, [("g", {}), ("h", {})])
        for call in ("f(a={1, 2})", "f(a=x)", "f(a=b'z')", "f(1)", "f(**{'a': 1})", "f(a=g())", "f(a=1e999)")
    ),
    ("pythonic", "[f(a=x), g(b=y), h(), i(c=z), j(d=", "f(a=x), g(b=y)i(c=z), j(d=", [("h", {})]),
    ("pythonic", "[f(a=x)]", "[f(a=x)]", []),
    ("pythonic", "[g()] and more", "", [("g", {})]),
    ("pythonic", r"[f(a='\ud83d', b='\ud83d\ude00')]", "", [("f", {"a": "\ufffd", "b": "😀"})]),
    # vLLM: test_deepseekv3_tool_parser.py, test_deepseekv31_tool_parser.py
    (
        "deepseek_v3",
        "Let me check.<｜tool▁calls▁begin｜>" + V3.format("f", '{"city": "Paris"}'),
        "Let me check.",
        [("f", {"city": "Paris"})],
    ),
    (
        "deepseek_v31",
        'some prefix text<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>foo<｜tool▁sep｜>{"x":1}<｜tool▁call▁end｜>'
        '<｜tool▁call▁begin｜>bar<｜tool▁sep｜>{"y":2}<｜tool▁call▁end｜><｜tool▁calls▁end｜> some suffix text',
        "some prefix text",
        [("foo", {"x": 1}), ("bar", {"y": 2})],
    ),
    (
        "deepseek_v31",
        "Let me look.<｜tool▁calls▁begin｜>get_weather",
        "Let me look.<｜tool▁calls▁begin｜>get_weather",
        [],
    ),
    (
        "deepseek_v31",
        '<｜tool▁calls▁begin｜>f<｜tool▁sep｜>{"x":1}<｜tool▁calls▁end｜>',
        '<｜tool▁calls▁begin｜>f<｜tool▁sep｜>{"x":1}<｜tool▁calls▁end｜>',
        [],
    ),
    # vLLM: test_qwen3coder_tool_parser.py
    (
        "qwen3_coder",
        f"Sure!<tool_call>\n{DALLAS}\n</tool_call>",
        "Sure!",
        [("get_current_weather", {"city": "Dallas", "state": "TX"})],
    ),
    ("qwen3_coder", DALLAS, "", [("get_current_weather", {"city": "Dallas", "state": "TX"})]),
    (
        "qwen3_coder",
        f"<tool_call>\n{DALLAS}\n</tool_call>\n<tool_call>\n<function=now>\n</function>\n</tool_call>",
        "",
        [("get_current_weather", {"city": "Dallas", "state": "TX"}), ("now", {})],
    ),
    (
        "qwen3_coder",
        "<tool_call>\n<function=typed>\n<parameter=i>\n42\n</parameter>\n<parameter=f>\n3.14\n</parameter>\n"
        '<parameter=b>\ntrue\n</parameter>\n<parameter=s>\n42\n</parameter>\n<parameter=o>\n{"w": 10, \n "h": 20}\n'
        "</parameter>\n<parameter=n>\nnull\n</parameter>\n<parameter=t>\n7\n</parameter>\n<parameter=e>\n1\n</parameter>\n"
        "</function>\n</tool_call>",
        "",
        [("typed", {"i": 42, "f": 3.14, "b": True, "s": "42", "o": {"w": 10, "h": 20}, "n": None, "t": "7", "e": "1"})],
    ),
    ("qwen3_coder", "<tool_call>oops", "<tool_call>oops", []),
    (
        "qwen3_coder",
        '<function=f>\n<parameter=a>\n["\\ud83d"]\n</parameter>\n</function>',
        "",
        [("f", {"a": ["\ufffd"]})],
    ),
    *(
        ("qwen3_coder", f"<function={name}><parameter=u>{value}</parameter></function>", "", [(name, {"u": value})])
        for name, value in (("typed", "NaN"), ("typed", "-Infinity"), ("typed", "1e999"), ("f", '{"a": [1e999]}'))
    ),
    # vLLM: test_glm4_moe_tool_parser.py
    (
        "glm45",
        f"I will help you. \n{GLM}\n\nmeanwhile\n{GLM}",
        "I will help you.",
        [("get_weather", {"city": "Beijing"})] * 2,
    ),
    (
        "glm45",
        "<tool_call>typed<arg_key>i</arg_key><arg_value>3</arg_value><arg_key>s</arg_key><arg_value>3</arg_value></tool_call>",
        "",
        [("typed", {"i": 3, "s": "3"})],
    ),
    ("glm45", "<tool_call>g</arg_value></tool_call>", "", [("g", {})]),
    (
        "glm45",
        "<tool_call>typed</arg_key>\n<arg_key>i</arg_key><arg_value>3</arg_value></tool_call>",
        "",
        [("typed", {"i": 3})],
    ),
    ("glm45", "<tool_call>f<arg_key>a</arg_key><arg_value>NaN</arg_value></tool_call>", "", [("f", {"a": "NaN"})]),
    (
        "gemma4",
        '<|tool_call>call:f{a:<|"|>x, {y}<|"|>,b:3,c:[1,<|"|>z<|"|>],d:{e:true},g:<|"|>4<|"|>}<tool_call|>',
        "",
        [("f", {"a": "x, {y}", "b": 3, "c": [1, "z"], "d": {"e": True}, "g": "4"})],
    ),
]


@pytest.mark.parametrize(("name", "text", "content", "calls"), CALLS)
def test_calls_are_parsed_in_any_chunking(name: str, text: str, content: str, calls: list[tuple[str, Any]]) -> None:
    expected = (content, "", calls)
    assert read(parser_of(name), [text]) == expected
    assert read(parser_of(name), list(text)) == expected
    for size in (2, 3, 5, 7):
        assert read(parser_of(name), [text[start : start + size] for start in range(0, len(text), size)]) == expected


def as_parameter(form: str, value: str) -> str:
    """Return a call of the tool ``t`` with the parameter ``p`` in a form whose values are plain text."""
    return {
        "qwen3_coder": f"<tool_call>\n<function=t>\n<parameter=p>\n{value}\n</parameter>\n</function>\n</tool_call>",
        "glm45": f"<tool_call>t\n<arg_key>p</arg_key>\n<arg_value>{value}</arg_value>\n</tool_call>",
        "functiongemma": f"<start_function_call>call:t{{p:<escape>{value}<escape>}}<end_function_call>",
    }[form]


def argument(form: str, schema: Any, value: str) -> Any:
    """Return the value that a parser finds in a parameter whose schema, with its definitions, is ``schema``."""
    tool = {"properties": {"p": schema}, "$defs": schema.get("$defs", {})}
    parser = formats_of(None, form).parser("", {"t": tool})
    assert parser is not None
    ((_, arguments),) = read(parser, [as_parameter(form, value)])[2]
    return arguments["p"]


TYPED_FORMS = ("qwen3_coder", "glm45", "functiongemma")


@pytest.mark.parametrize("form", TYPED_FORMS)
@pytest.mark.parametrize(
    ("schema", "text", "value"),
    [
        ({"const": "7"}, "7", "7"),
        ({"const": 7}, "7", 7),
        ({"enum": ["1", None]}, "1", "1"),
        ({"enum": ["1", None]}, "null", None),
        ({"pattern": "^[0-9]+$"}, "7", "7"),
        ({"minLength": 1}, "true", "true"),
        ({"format": "date"}, "2026", "2026"),
        ({"format": "int64"}, "7", 7),
        ({"allOf": [{"type": ["string", "null"]}, {"type": "string"}]}, "null", "null"),
        ({"anyOf": [{"type": "string"}, {"properties": {}}]}, '{"a": 1}', {"a": 1}),
        ({"anyOf": [{"type": "string"}, {"properties": {}}]}, "7", "7"),
        ({"type": "number"}, "7", 7),
        ({"allOf": [{"type": "integer"}, {"type": "number"}]}, "7", 7),
        ({"$ref": "#"}, "7", 7),
        ({"$ref": "#/$defs/missing"}, "7", 7),
        ({"$ref": "#/$defs/a~1b%20c/anyOf/1", "$defs": {"a/b c": {"anyOf": [{}, {"type": "string"}]}}}, "7", "7"),
        ({"$ref": "#/$defs/loop", "$defs": {"loop": {"$ref": "#/$defs/loop"}}}, "7", 7),
        ({"description": "anything"}, "7", 7),
        ({"description": "anything"}, "7 days", "7 days"),
    ],
)
def test_argument_has_the_type_of_its_schema(form: str, schema: Any, text: str, value: Any) -> None:
    found = argument(form, schema, text)
    assert (found, type(found)) == (value, type(value))


_WRAPPERS = st.lists(st.sampled_from(["$ref", "anyOf", "oneOf", "allOf", "description"]), max_size=20)


@given(
    st.sampled_from(TYPED_FORMS),
    st.sampled_from([{"type": "string"}, {"type": ["integer", "null"]}, {"enum": ["7", "true"]}, {"type": "boolean"}]),
    _WRAPPERS,
    st.sampled_from(["7", "true", "null", "02134", '"x"', "x"]),
)
def test_reference_to_a_schema_gives_the_type_of_the_schema(
    form: str, schema: dict[str, Any], wrappers: list[str], text: str
) -> None:
    wrapped, definitions = schema, {}
    for number, wrapper in enumerate(wrappers):
        if wrapper == "$ref":
            definitions[f"d{number}"] = wrapped
            wrapped = {"$ref": f"#/$defs/d{number}"}
        else:
            wrapped = {**wrapped, "description": "x"} if wrapper == "description" else {wrapper: [wrapped]}
    assert argument(form, {**wrapped, "$defs": definitions}, text) == argument(form, schema, text)


def test_strings_within_values_have_the_types_of_their_schemas() -> None:
    schema = {
        "$ref": "#/$defs/args",
        "$defs": {
            "args": {
                "properties": {
                    "list": {"items": {"$ref": "#/$defs/text"}},
                    "pair": {"prefixItems": [{"type": "string"}], "items": {"type": "integer"}},
                    "object": {"anyOf": [{"properties": {"a": {"$ref": "#/$defs/text"}}}, {"type": "null"}]},
                    "free": {"type": "array"},
                },
                "additionalProperties": {"type": "string"},
            },
            "text": {"type": "string"},
        },
    }
    parser = formats_of(None, "functiongemma").parser("", {"f": schema})
    assert parser is not None
    text = "list:[~5~,~b~],pair:[~5~,~6~],object:{a:~7~,b:~8~},free:[~5~,b],other:~9~".replace("~", "<escape>")
    expected = {"list": ["5", "b"], "pair": ["5", 6], "object": {"a": "7", "b": 8}, "free": [5, "b"], "other": "9"}
    calls = read(parser, [f"<start_function_call>call:f{{{text}}}<end_function_call>"])[2]
    assert calls == [("f", expected)]


HARMONY = (
    "<|channel|>analysis<|message|>We need a tool.<|end|><|start|>assistant<|channel|>commentary "
    'to=functions.get_weather <|constrain|>json<|message|>{"location": "Tokyo"}<|call|>'
)


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        # vLLM: test_openai_tool_parser.py
        ("<|channel|>final<|message|>This is a test", ("This is a test", "", [])),
        (HARMONY, ("", "We need a tool.", [("get_weather", {"location": "Tokyo"})])),
        (
            HARMONY + "<|start|>assistant<|channel|>final<|message|>Done.<|return|>",
            ("Done.", "We need a tool.", [("get_weather", {"location": "Tokyo"})]),
        ),
        (
            "<|channel|>commentary to=functions.f<|message|>foo",
            ("", "", [("f", ("invalid", "foo"))]),
        ),
        # further cases
        ("no tags at all", ("no tags at all", "", [])),
        ("<|channel|>analysis<|message|>cut", ("", "cut", [])),
    ],
)
def test_harmony_channels_are_separated(text: str, answer: Answer) -> None:
    for pieces in ([text], list(text)):
        assert read(parser_of("openai"), pieces) == answer
        assert read(parser_of("none", "openai_gptoss"), pieces) == answer


REST = "This is the rest"
PART = "This is a reasoning section"


@pytest.mark.parametrize(
    ("name", "prompt", "text", "reasoning", "content"),
    [
        # vLLM: test_deepseekr1_reasoning_parser.py
        ("deepseek_r1", "", f"{PART}</think>{REST}", PART, REST),
        ("deepseek_r1", "", PART, PART, ""),
        ("deepseek_r1", "", f"</think>{REST}", "", REST),
        ("deepseek_r1", "", f"<think>{PART}</think>{REST}", PART, REST),
        ("deepseek_r1", "", f"<think>{PART}", PART, ""),
        ("deepseek_r1", "", f"\n<think>{PART}</think>\n{REST}", PART, f"\n{REST}"),
        ("deepseek_r1", "", "", "", ""),
        # vLLM: test_qwen3_reasoning_parser.py, whose model's prompt opens the reasoning
        ("qwen3", "<think>\n", f"{PART}</think>{REST}", PART, REST),
        ("qwen3", "<think>\n", f"{PART}</think>", PART, ""),
        ("qwen3", "<think>\n", REST, REST, ""),
        ("qwen3", "", f"<think>{PART}</think>{REST}\nThat", PART, f"{REST}\nThat"),
        ("qwen3", "<think>\n\n</think>\n\n", REST, "", REST),
        # vLLM: test_granite_reasoning_parser.py
        ("granite", "", f"Here is my thought process:{PART}Here is my response:{REST}", PART, REST),
        ("granite", "", "Here is my thought failure", "", "Here is my thought failure"),
        ("granite", "", "Here is my thought process: foo Here is Here", " foo Here is Here", ""),
        # further cases
        ("deepseek_r1", "<think>\n\n</think>", REST, "", REST),
        ("qwen3", "", "a </think> b", "", "a </think> b"),
    ],
)
def test_reasoning_is_separated_from_content(name: str, prompt: str, text: str, reasoning: str, content: str) -> None:
    for pieces in ([text], list(text)):
        assert read(parser_of("none", name, prompt), pieces) == (content, reasoning, [])


def test_a_call_ends_reasoning_that_is_not_closed() -> None:
    text = 'I need it.\n\n<tool_call>{"name": "f", "arguments": {}}</tool_call>'
    assert read(parser_of("hermes", "qwen3", "<think>\n"), list(text)) == ("", "I need it.\n\n", [("f", {})])
    assert read(parser_of("hermes", "qwen3", "<think>\n"), ["hm</think>\n\n", text]) == (
        "\n\nI need it.",
        "hm",
        [("f", {})],
    )


CALL_OF_G = {
    "hermes": '<tool_call>{"name": "g", "arguments": {"a": 1}}</tool_call>',
    "qwen3_coder": "<tool_call>\n<function=g>\n<parameter=a>\n1\n</parameter>\n</function>\n</tool_call>",
    "glm45": "<tool_call>g<arg_key>a</arg_key><arg_value>1</arg_value></tool_call>",
    "mistral": '[TOOL_CALLS]g{"a": 1}',
    "deepseek_v3": "<｜tool▁calls▁begin｜>" + V3.format("g", '{"a": 1}') + "<｜tool▁calls▁end｜>",
    "deepseek_v31": '<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>g<｜tool▁sep｜>{"a": 1}<｜tool▁call▁end｜>'
    "<｜tool▁calls▁end｜>",
    "functiongemma": "<start_function_call>call:g{a:1}<end_function_call>",
    "gemma4": "<|tool_call>call:g{a:1}<tool_call|>",
    "llama3_json": '<|python_tag|>{"name": "g", "parameters": {"a": 1}}',
}


@pytest.mark.parametrize("tools", [each.names[0] for each in TOOL_FORMATS if each.start])
@pytest.mark.parametrize(
    "reasoning", [each for each in REASONING_FORMATS if each.start], ids=lambda each: each.names[0]
)
def test_reasoning_that_mentions_the_tag_of_calls_stays_reasoning(tools: str, reasoning: ReasoningFormat) -> None:
    (tag,) = formats_of(None, tools).tools.start  # type: ignore[union-attr]
    call = CALL_OF_G[tools]
    thought = f"I could write {tag} tags, or {tag}. {tag}"
    text = f"{reasoning.start}{thought}{reasoning.end}\n\nDone."
    for answer, expected in (
        (text, ("\n\nDone.", thought, [])),
        (text + call, ("\n\nDone.", thought, [("g", {"a": 1})])),
        (f"{reasoning.start}{thought}{call}{call}", ("", thought, [("g", {"a": 1})] * 2)),
        (f"{reasoning.start}{thought}", ("", thought, [])),
    ):
        for pieces in ([answer], list(answer)):
            assert read(parser_of(tools, reasoning.names[0]), pieces) == expected


def test_reasoning_that_mentions_a_tag_is_not_held_back() -> None:
    """Text after a tag without a call is shown as it arrives, for all forms."""
    for name, call in CALL_OF_G.items():
        (tag,) = formats_of(None, name).tools.start  # type: ignore[union-attr]
        parser = parser_of(name, "qwen3", "<think>\n")
        shown = reasoning_so_far(parser, [*f"The {tag} tag starts calls like "])
        assert shown == f"The {tag} tag starts calls like ", name
        assert read(parser, [call])[2] == [("g", {"a": 1})]


def reasoning_so_far(parser: AnswerParser, pieces: list[str]) -> str:
    """Return the text of the reasoning so far."""
    return "".join(event.text for piece in pieces for event in parser.feed(piece) if isinstance(event, Reasoning))


_PIECES = st.sampled_from(
    sorted(
        {tag for each in TOOL_FORMATS for tag in (*each.markers, *each.start)}
        | {tag for each in REASONING_FORMATS for tag in (each.start, each.end) if tag}
        | {
            "<function=f>",
            "<parameter=a>",
            "</parameter>",
            "</function>",
            "```json",
            "call:f{",
            "f(a=",
            "to=functions.f",
        }
        | {text for name, text, *_ in CALLS if len(text) < 300}
        | set(CALL_OF_G.values())
        | {
            '{"name": "f", "arguments": ',
            '{"name": "f", "parameters": {}}',
            '{"a": "\\"}"}',
            '"',
            "\\",
            r"\ud83d",
            r"\ude00",
            "'",
            "{",
            "}",
        }
        | {"[", "]", "(", ")", ",", ":", ";", " ", "\n", "x", "7", "é", "null", "<", "<t", ">"}
    )
)
_TEXTS = st.lists(_PIECES, max_size=25).map("".join)
_CHOSEN = st.tuples(st.sampled_from(["none", *TOOL_NAMES]), st.sampled_from(["none", *REASONING_NAMES])).filter(
    lambda chosen: chosen != ("none", "none")
)


@given(_CHOSEN, st.sampled_from(["", "<think>\n"]), _TEXTS, st.data())
def test_any_chunking_gives_the_same_answer(
    chosen: tuple[str, str], prompt: str, text: str, data: st.DataObject
) -> None:
    tools, reasoning = chosen
    cuts = sorted(data.draw(st.sets(st.integers(0, len(text)), max_size=12)))
    pieces = [text[start:end] for start, end in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    whole = events_of(parser_of(tools, reasoning, prompt), [text])
    assert events_of(parser_of(tools, reasoning, prompt), pieces) == whole


@given(st.sampled_from(TOOL_NAMES), st.text(alphabet="abc .,!?\n", max_size=40))
def test_plain_text_stays_as_it_is(name: str, text: str) -> None:
    assert read(parser_of(name), [text]) == (text, "", [])


@pytest.mark.parametrize("name", TOOL_NAMES)
def test_the_cost_of_a_long_hostile_answer_is_bounded(name: str) -> None:
    """An answer of 100,000 characters of tags is read without deep recursion; a quadratic reader would not end."""
    for each in (
        "<tool_call>",
        '{"name": "f", "arguments": {"a": ',
        "[",
        "[f(a=",
        "<function=f><parameter=a>",
        "<arg_key>",
        "{",
        '{"a": [',
        '{"name": "f", "x": {',
    ):
        content, _, calls = read(parser_of(name), [each * (100_000 // len(each))])
        assert len(content) <= 100_000 and len(calls) <= 100_000


TEMPLATES = {
    '{% if tools %}<tool_call>{"name": <n>, "arguments": <a>}</tool_call>{% endif %}</think>': ("hermes", "qwen3"),
    "<tool_call>\n<function=n>\n<parameter=p>": ("qwen3_coder", None),
    "<tool_call>{n}<arg_key>k</arg_key><arg_value>": ("glm45", None),
    "'<｜tool▁calls▁begin｜>' + '```json'": ("deepseek_v3", None),
    "'<｜tool▁calls▁begin｜>'": ("deepseek_v31", None),
    "[TOOL_CALLS] [THINK] [/THINK]": ("mistral", "mistral"),
    'Environment: ipython {"name": n, "parameters": dictionary of argument name}': ("llama3_json", None),
    "[func_name1(params_name1=params_value1)]": ("pythonic", None),
    "<start_function_call>": ("functiongemma", None),
    "<|tool_call>call: <|channel>thought <channel|>": ("gemma4", "gemma4"),
    "<|channel|>analysis<|message|>": ("openai", "openai_gptoss"),
    "<tool_call>]<invoke name=": (None, None),
    "{{ messages[0].content }}": (None, None),
}


@pytest.mark.parametrize(("template", "names"), TEMPLATES.items())
def test_a_chat_template_shows_its_formats(template: str, names: tuple[str | None, str | None]) -> None:
    found = formats_of(template)
    assert (found.tools and found.tools.names[0], found.reasoning and found.reasoning.names[0]) == names
    assert formats_of(template, "none", "none") == AnswerFormats(renders_tools="tools" in template)
    assert formats_of(None) == AnswerFormats()


def test_text_without_markup_is_plain_content() -> None:
    assert formats_of(None, "hermes").parser("", None) is None
    assert formats_of(None, "none", "qwen3").parser("", None) is not None
