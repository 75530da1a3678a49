"""Constraints become grammars of llguidance that accept what they should, and hostile or unknown ones are named."""

import json
from typing import Any

import llguidance
import pytest

from quire_engine.grammar.compiler import LIMITS, MAX_CHOICES, compile_grammar, make_tokenizer, without_anchors
from quire_engine.grammar.spec import MAX_DEPTH, GrammarError, GrammarKind, GrammarSpec, Vocabulary

WORDS = [b'{"', b'":', b" the", b"<tool_call>"]
FIRST_WORD = 256
CALL, END_CALL, EOS, OTHER_EOS = 256 + len(WORDS), 257 + len(WORDS), 258 + len(WORDS), 259 + len(WORDS)
VOCABULARY = Vocabulary(
    tokens=[*(bytes([byte]) for byte in range(256)), *WORDS, b"", b"", b"", b"", b"", b""],
    special_tokens={"<|call|>": CALL, "<|end_call|>": END_CALL, "<|end|>": EOS},
    eos_token_ids=(EOS, OTHER_EOS),
)
TOKENIZER = make_tokenizer(VOCABULARY)
SCHEMA = {
    "type": "object",
    "properties": {"n": {"type": "integer"}},
    "required": ["n"],
    "additionalProperties": False,
}


def compiled(kind: GrammarKind, value: Any, **options: Any) -> str:
    text = value if isinstance(value, str) else json.dumps(value)
    return compile_grammar(GrammarSpec(kind=kind, text=text, param="p", **options), VOCABULARY, TOKENIZER)


def ids_of(text: str) -> list[int]:
    """Return the tokens of a text: special ones by name, all others by byte."""
    ids: list[int] = []
    while text:
        name = next((each for each in VOCABULARY.special_tokens if text.startswith(each)), None)
        if name is not None:
            ids.append(VOCABULARY.special_tokens[name])
            text = text.removeprefix(name)
        else:
            ids += text[0].encode()
            text = text[1:]
    return ids


def accepts(grammar: str, text: str) -> bool:
    matcher = llguidance.LLMatcher(TOKENIZER, grammar, log_level=0, limits=LIMITS)
    for token_id in ids_of(text):
        if not allowed(matcher, token_id):
            return False
        assert matcher.consume_token(token_id)
    return allowed(matcher, EOS) and allowed(matcher, OTHER_EOS)


def allowed(matcher: llguidance.LLMatcher, token_id: int) -> bool:
    mask = matcher.compute_bitmask()
    return bool(mask[token_id // 8] >> token_id % 8 & 1)


def tag(begin: str, content: Any, end: str) -> dict[str, Any]:
    return {"type": "tag", "begin": begin, "content": content, "end": end}


NUMBER = {"type": "json_schema", "json_schema": {"type": "integer"}}
LEGACY = {
    "structures": [
        {"begin": "<f=a>", "schema": {"type": "integer"}, "end": "</f>"},
        {"begin": "<f=b>", "schema": {"type": "boolean"}, "end": "</f>"},
    ],
    "triggers": ["<f="],
}
CALLS = {
    "structures": [{"begin": "<|call|>f(", "schema": SCHEMA, "end": ")<|end_call|>"}],
    "triggers": ["<|call|>"],
}


@pytest.mark.parametrize(
    ("kind", "value", "valid", "invalid"),
    [
        ("json_schema", SCHEMA, ['{"n":1}', '{ "n": -12 }'], ["{}", '{"n":"1"}', '{"n":1,"m":2}', "[]", ""]),
        ("json_schema", True, ["1", '"a"', "[{}]"], ["", "x"]),
        ("json_schema", {"type": "object"}, ["{}", '{"a":[1]}'], ["[]", "1"]),
        (
            "json_schema",
            {"$defs": {"node": {"type": "array", "items": {"$ref": "#/$defs/node"}}}, "$ref": "#/$defs/node"},
            ["[]", "[[],[[]]]"],
            ["[1]", "{}"],
        ),
        ("json_schema", {"type": "string", "format": "password"}, ['"x"'], ["1"]),
        (
            "json_schema",
            {"type": "string", "format": "date"},
            ['"2026-01-31"', '"2026-02-28"', '"2024-02-29"', '"2000-02-29"'],
            ['"x"', '"2026-02-29"', '"1900-02-29"', '"2026-02-30"'],
        ),
        (
            "json_schema",
            {"type": "string", "format": "date-time", "pattern": "^(1|2)"},
            ['"1998-12-31T23:59:60Z"', '"2026-03-01t12:00:59.25+05:30"'],
            ['"2026-03-01T12:00:60Z"', '"2026-02-29T12:00:00Z"', '"3026-03-01T12:00:59Z"'],
        ),
        ("json_schema", {"format": "time"}, ['"12:00:59Z"', '"23:59:60.5z"', "1"], ['"12:00:60Z"', '"24:00:00Z"']),
        (
            "json_schema",
            {"properties": {"format": {"const": "password"}}, "required": ["format"], "additionalProperties": False},
            ['{"format":"password"}'],
            ['{"format":"x"}'],
        ),
        ("json_schema", {"oneOf": [{"type": "string"}, {"type": "integer"}]}, ["1", '"a"'], ["true"]),
        ("regex", "^[a-z]+-\\d{2}$", ["ab-12"], ["-12", "ab-1", "ab-123", "ab-12\n"]),
        ("regex", "a|b/c", ["a", "b/c"], ["c", "ab"]),
        ("choice", ["yes", "no (not)", "a/b", "é😀", ""], ["yes", "no (not)", "a/b", "é😀", ""], ["maybe", "ye"]),
        ("grammar", 'root ::= "x" [0-9]+ | "y"', ["x12", "y"], ["x", "z"]),
        ("grammar", 'start: "a" rest\nrest: /[0-9]/', ["a1"], ["a", "ab"]),
        ("structural_tag", LEGACY, ["free text", "x <f=a>1</f> <f=b>true</f>."], ["<f=a>true</f>", "<f=c>", "<f=a>1"]),
        (
            "structural_tag",
            CALLS,
            ["text", 'I call <|call|>f({"n":1})<|end_call|> now'],
            ["<|call|>g(", '<|call|>f({"n":1})', "<|end_call|>", '<|call|>f({"m":1})<|end_call|>'],
        ),
        (
            "structural_tag",
            {
                "format": {
                    "type": "triggered_tags",
                    "triggers": ["<n"],
                    "tags": [tag("<n>", NUMBER, "</n>")],
                    "at_least_one": True,
                }
            },
            ["a <n>1</n> b"],
            ["a", "<n>x</n>"],
        ),
        (
            "structural_tag",
            {
                "format": {
                    "type": "tags_with_separator",
                    "separator": "\n",
                    "tags": [tag("<n>", NUMBER, "</n>"), tag("<t>", {"type": "any_text"}, "</t>")],
                    "at_least_one": True,
                }
            },
            ["<n>1</n>", "<t>x<y</t>\n<n>2</n>"],
            ["", "<n>1</n><n>2</n>", "<n>x</n>", "text"],
        ),
        (
            "structural_tag",
            {
                "format": {
                    "type": "sequence",
                    "elements": [
                        {"type": "const_string", "value": "x: "},
                        {
                            "type": "or",
                            "elements": [
                                {"type": "regex", "pattern": "[a-z]/\\d"},
                                {"type": "grammar", "grammar": 'start: "Q"'},
                            ],
                        },
                    ],
                }
            },
            ["x: a/1", "x: Q"],
            ["x: ", "x: 1", "Q"],
        ),
    ],
)
def test_a_constraint_accepts_its_texts_and_no_others(
    kind: GrammarKind, value: Any, valid: list[str], invalid: list[str]
) -> None:
    grammar = compiled(kind, value)
    assert [text for text in valid if not accepts(grammar, text)] == []
    assert [text for text in invalid if accepts(grammar, text)] == []


@pytest.mark.parametrize(("pattern", "spaced"), [("", False), (None, True), ("[ ]?", True)])
def test_the_space_in_json_can_be_chosen(pattern: str | None, spaced: bool) -> None:
    grammar = compiled("json_schema", SCHEMA, whitespace_pattern=pattern)
    assert accepts(grammar, '{"n":1}')
    assert accepts(grammar, '{ "n": 1}') is spaced
    assert accepts(grammar, '{\n  "n":1\n}') is (pattern is None)
    assert not accepts(grammar, '{   "n":1}')


def test_tokens_of_several_bytes_are_allowed_where_their_text_is() -> None:
    matcher = llguidance.LLMatcher(TOKENIZER, compiled("json_schema", SCHEMA), log_level=0)
    assert allowed(matcher, FIRST_WORD) and allowed(matcher, ord("{"))
    assert not allowed(matcher, CALL) and not allowed(matcher, EOS)


@pytest.mark.parametrize(
    ("kind", "value", "reason"),
    [
        ("json_schema", {"not": {"pattern": "a"}}, '"not"'),
        ("json_schema", {"properties": {"a": {"uniqueItems": True}}}, '"uniqueItems"'),
        ("json_schema", {"if": {"pattern": "a"}, "then": {}}, '"if"'),
        ("json_schema", {"type": "frob"}, "frob"),
        ("json_schema", {"$ref": "http://localhost/x"}, "http://localhost/x"),
        ("json_schema", {"$ref": "#/nowhere"}, "/nowhere"),
        ("json_schema", False, "no value"),
        ("json_schema", {"enum": []}, "empty"),
        ("json_schema", {"x-guidance": {"lenient": True}, "not": {"pattern": "a"}}, '"not"'),
        ("regex", "((", "unclosed"),
        ("regex", "(?=a)b", "look-around"),
        ("choice", [str(number) for number in range(MAX_CHOICES + 1)], str(MAX_CHOICES)),
        ("grammar", "start:: x", "Expected"),
        ("grammar", "SELECT 1", "::="),
        ("grammar", 'answer ::= "x"', "'root'"),
        ("grammar", "root ::= answer", "'answer'"),
        ("structural_tag", {}, "format"),
        ("structural_tag", {"format": {"type": "frob"}}, "'frob'"),
        ("structural_tag", {**LEGACY, "triggers": ["<g="]}, "<f=a>"),
        ("structural_tag", {**LEGACY, "structures": []}, "structures"),
        ("structural_tag", {"format": {"type": "tags_with_separator", "separator": ",", "tags": []}}, "tags"),
    ],
)
def test_an_invalid_constraint_is_refused_with_its_reason(kind: GrammarKind, value: Any, reason: str) -> None:
    with pytest.raises(GrammarError) as caught:
        compiled(kind, value)
    assert reason in str(caught.value)
    assert len(str(caught.value)) <= 600


def test_a_schema_that_is_nested_too_deeply_is_refused() -> None:
    schema: dict[str, Any] = {"type": "integer"}
    for _ in range(MAX_DEPTH):
        schema = {"type": "array", "items": schema}
    with pytest.raises(GrammarError) as caught:
        compiled("json_schema", schema)
    assert str(MAX_DEPTH) in str(caught.value)


@pytest.mark.parametrize(
    ("pattern", "bare"),
    [("^a$", "a"), ("a", "a"), ("a\\$", "a\\$"), ("a\\\\$", "a\\\\"), ("^", ""), ("$", "")],
)
def test_anchors_at_the_ends_of_a_pattern_are_removed(pattern: str, bare: str) -> None:
    assert without_anchors(pattern) == bare
