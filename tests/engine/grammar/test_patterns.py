"""Patterns of schemas match what they match in ECMA 262, by the verdicts of Node.

``patterns.json`` has patterns with those of its strings that ``new RegExp(pattern, "u").test(string)`` accepts, or
``new RegExp(pattern)`` where the flag makes the pattern an error (``false``). Without the flag a character outside the
basic plane is two, so that such strings are left out.
"""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from quire_engine.grammar.spec import GrammarError

TABLE = json.loads(Path(__file__).with_name("patterns.json").read_bytes())


@pytest.mark.parametrize(("pattern", "with_flag", "matching"), TABLE["patterns"], ids=lambda each: repr(each)[:40])
def test_patterns_match_as_in_node(
    grammar: Callable[..., str], accepts: Callable[[str, str], bool], pattern: str, with_flag: bool, matching: list[str]
) -> None:
    strings = [each for each in TABLE["strings"] if with_flag or each.isascii() or len(each.encode("utf-16-le")) == 2]
    try:
        compiled = grammar("json_schema", json.dumps({"type": "string", "pattern": pattern}))
    except GrammarError as error:
        assert str(error) == "it allows no value" and not matching
        return
    accepted = [each for each in strings if accepts(compiled, json.dumps(each, ensure_ascii=False))]
    assert accepted == [each for each in matching if each in strings]


@pytest.mark.parametrize(
    ("pattern", "reason"),
    [
        (r"\Aa\z", r"\A"),
        (r"a\Z", r"\Z"),
        ("(?x)a", "flags"),
        ("(?s:.)", "flags"),
        ("(?=a)b", "look-around"),
        ("(?<!a)b", "look-around"),
        (r"\bword\b", "word boundaries"),
        (r"(a)\1", "back references"),
        (r"(?<n>a)\k<n>", "back references"),
        ("a**", "repeated"),
        ("*a", "nothing to repeat"),
        ("(a", "unclosed"),
        ("a)", "not open"),
        ("[a", "unclosed"),
        ("[b-a]", "out of order"),
        ("a{2,1}", "out of order"),
        ("(^a)*", "repetition"),
        ("a\\", "backslash"),
        (r"\ud83d", "no character"),
        (r"\p{Nonsense}", "cannot be compiled"),
        ("(" * 200 + ")" * 200, "nested"),
    ],
)
def test_unenforceable_pattern_is_refused_with_its_reason(
    grammar: Callable[..., str], pattern: str, reason: str
) -> None:
    for schema in ({"pattern": pattern}, {"patternProperties": {pattern: {}}, "additionalProperties": False}):
        with pytest.raises(GrammarError) as caught:
            grammar("json_schema", json.dumps(schema))
        assert reason in str(caught.value)
